/* The recorder of operator calls.
 *
 * Every aclnn...GetWorkspaceSize symbol of stubs.c jumps to aclnn_entry below, which keeps the argument registers and hands
 * them to record_call. The prototypes of those functions are not known here, but the calling convention is: six integer
 * registers, eight floating-point registers, then the stack. Each call ends with two addresses of zeroed variables of the
 * caller (workspace size and executor); they mark the end of the arguments.
 *
 * Nothing is executed by those functions. While calls are recorded they succeed, because values come from elsewhere. At any
 * other time an operator call means that torch_npu wants something computed past PyTorch's dispatcher: native.c computes
 * what it knows, and the rest fails by name, because success would leave garbage in the result.
 */
#define _GNU_SOURCE
#include <inttypes.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#include "acl/acl_op_compiler.h"
#include "aclnn.h"

#if !defined(__x86_64__)
#error "the recorder is written for the x86-64 calling convention"
#endif

__asm__(
    ".text\n"
    ".globl aclnn_entry\n"
    ".type aclnn_entry, @function\n"
    "aclnn_entry:\n"              /* rax: name of the called function */
    "  push %rbp\n"
    "  mov %rsp, %rbp\n"
    "  sub $112, %rsp\n"          /* 6 integers, then 8 doubles */
    "  mov %rdi, 0(%rsp)\n"
    "  mov %rsi, 8(%rsp)\n"
    "  mov %rdx, 16(%rsp)\n"
    "  mov %rcx, 24(%rsp)\n"
    "  mov %r8, 32(%rsp)\n"
    "  mov %r9, 40(%rsp)\n"
    "  movsd %xmm0, 48(%rsp)\n"
    "  movsd %xmm1, 56(%rsp)\n"
    "  movsd %xmm2, 64(%rsp)\n"
    "  movsd %xmm3, 72(%rsp)\n"
    "  movsd %xmm4, 80(%rsp)\n"
    "  movsd %xmm5, 88(%rsp)\n"
    "  movsd %xmm6, 96(%rsp)\n"
    "  movsd %xmm7, 104(%rsp)\n"
    "  mov %rax, %rdi\n"
    "  mov %rsp, %rsi\n"
    "  lea 48(%rsp), %rdx\n"
    "  lea 16(%rbp), %rcx\n"      /* past the saved rbp and the return address */
    "  call operator_call\n"
    "  leave\n"
    "  ret\n");

#define MAX_ARGUMENTS 128

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
int recording;
static char *text;  /* recorded calls, one JSON object to a line */
static size_t length, room;

static void append(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int needed = vsnprintf(NULL, 0, format, arguments);
    va_end(arguments);
    if (length + (size_t)needed + 1 > room) {
        room = (length + (size_t)needed + 1) * 2;
        text = realloc(text, room);
    }
    va_start(arguments, format);
    vsnprintf(text + length, room - length, format, arguments);
    va_end(arguments);
    length += (size_t)needed;
}

/* Start (1) or stop (0) recording. What was recorded stays until it is taken. */
void virtual_npu_record(int on) { recording = on; }

/* The calls recorded since the last take, to be given back with virtual_npu_release; NULL if there are none. */
char *virtual_npu_take(void) {
    pthread_mutex_lock(&lock);
    char *taken = text;
    text = NULL;
    length = room = 0;
    pthread_mutex_unlock(&lock);
    return taken;
}
void virtual_npu_release(char *taken) { free(taken); }

/* Read memory that may not be there. */
static int peek(uintptr_t address, void *to, size_t size) {
    struct iovec local = {to, size}, remote = {(void *)address, size};
    return process_vm_readv(getpid(), &local, 1, &remote, 1, 0) == (ssize_t)size;
}

/* A pointer to text of 2 to 63 printable characters? */
static int as_text(uintptr_t address, char *to) {
    for (int i = 0; i < 64; i++) {
        if (!peek(address + (uintptr_t)i, to + i, 1)) return 0;
        if (!to[i]) return i > 1;
        if (to[i] < 32 || to[i] > 126 || to[i] == '"' || to[i] == '\\') return 0;
    }
    return 0;
}

static void one(long value) {
    Handle handle;
    char string[64];
    if (value > 0x10000 && peek((uintptr_t)value, &handle, sizeof handle) && handle.magic == HANDLE_MAGIC) append("%s", handle.json);
    else if (value > 0x10000 && as_text((uintptr_t)value, string)) append("\"%s\"", string);
    else if (value > 0x10000 && peek((uintptr_t)value, string, 1)) append("{\"pointer\": true}");
    else append("%ld", value);
}

static int is_zeroed_local(uintptr_t address, uintptr_t stack) {
    long value = 1;
    int near = address > stack - 0x4000 && address < stack + 0x40000 && !(address & 7);
    return near && peek(address, &value, sizeof value) && value == 0;
}

static void record_call(const char *name, const long *all, int count, const double *floats) {
    pthread_mutex_lock(&lock);
    append("{\"op\": \"%s\", \"arguments\": [", name);
    for (int i = 0; i < count; i++) {
        if (i) append(", ");
        one(all[i]);
    }
    append("], \"registers\": [");
    for (int i = 0; i < 8; i++) {
        uint64_t bits;
        memcpy(&bits, &floats[i], sizeof bits);
        append(i ? ", %" PRIu64 : "%" PRIu64, bits);
    }
    append("]}\n");
    pthread_mutex_unlock(&lock);
}

static _Thread_local char message[256] = "reported by the virtual NPU";
const char *aclGetRecentErrMsg(void) { return message; }

static int refuse(const char *name) {
    snprintf(message, sizeof message, "the virtual NPU does not compute %s, which torch_npu calls past PyTorch's dispatcher", name);
    return ACL_ERROR_FEATURE_UNSUPPORTED;
}

__attribute__((used, visibility("default"))) int operator_call(const char *name, const long *integers, const double *floats,
                                                               const long *stack) {
    if (!recording) return compute_call(name, integers) ? refuse(name) : 0;
    long all[MAX_ARGUMENTS];
    memcpy(all, integers, 6 * sizeof(long));
    if (!peek((uintptr_t)stack, all + 6, sizeof all - 6 * sizeof(long))) memset(all + 6, 0, sizeof all - 6 * sizeof(long));
    int count = 0;
    while (count + 1 < MAX_ARGUMENTS && !(all[count] != all[count + 1] && is_zeroed_local((uintptr_t)all[count], (uintptr_t)stack) &&
                                          is_zeroed_local((uintptr_t)all[count + 1], (uintptr_t)stack)))
        count++;
    record_call(name, all, count, floats);
    return 0;
}

/* The older way to execute an operator, by its name. */
aclError aclopCompileAndExecute(const char *name, int inputs, const aclTensorDesc *const input[], const aclDataBuffer *const in[],
                                int outputs, const aclTensorDesc *const output[], aclDataBuffer *const out[],
                                const aclopAttr *attributes, aclopEngineType engine, aclopCompileType compile, const char *path,
                                aclrtStream stream) {
    static const double none[8];
    if (!recording) return refuse(name);
    record_call(name, NULL, 0, none);
    return ACL_SUCCESS;
}
aclError aclopCompileAndExecuteV2(const char *name, int inputs, aclTensorDesc *input[], aclDataBuffer *in[], int outputs,
                                  aclTensorDesc *output[], aclDataBuffer *out[], aclopAttr *attributes, aclopEngineType engine,
                                  aclopCompileType compile, const char *path, aclrtStream stream) {
    return aclopCompileAndExecute(name, inputs, NULL, NULL, outputs, NULL, NULL, NULL, engine, compile, path, stream);
}
