/* The operator library's side: aclnn parameter handles that remember what they were made of, and a recorder of calls.
 *
 * Every aclnn...GetWorkspaceSize symbol of stubs.c jumps to aclnn_entry below, which keeps the argument registers and hands
 * them to record_call. The prototypes of those functions are not known here, but the calling convention is: six integer
 * registers, eight floating-point registers, then the stack. Each call ends with two addresses of zeroed variables of the
 * caller (workspace size and executor); they mark the end of the arguments.
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

#include "runtime.h"

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
    "  call record_call\n"
    "  xor %eax, %eax\n"
    "  leave\n"
    "  ret\n");

#define MAGIC UINT64_C(0x76697274756e7075)
#define MAX_ARGUMENTS 128

typedef struct Handle {
    uint64_t magic;
    char *json;
    struct Handle **members;  /* of a list, which owns them */
    uint64_t count;
} Handle;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int recording;
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
    if (value > 0x10000 && peek((uintptr_t)value, &handle, sizeof handle) && handle.magic == MAGIC) append("%s", handle.json);
    else if (value > 0x10000 && as_text((uintptr_t)value, string)) append("\"%s\"", string);
    else if (value > 0x10000 && peek((uintptr_t)value, string, 1)) append("{\"pointer\": true}");
    else append("%ld", value);
}

static int is_zeroed_local(uintptr_t address, uintptr_t stack) {
    long value = 1;
    int near = address > stack - 0x4000 && address < stack + 0x40000 && !(address & 7);
    return near && peek(address, &value, sizeof value) && value == 0;
}

__attribute__((used, visibility("default"))) void record_call(const char *name, const long *integers, const double *floats,
                                                              const long *stack) {
    if (!recording) return;
    long all[MAX_ARGUMENTS];
    memcpy(all, integers, 6 * sizeof(long));
    if (!peek((uintptr_t)stack, all + 6, sizeof all - 6 * sizeof(long))) memset(all + 6, 0, sizeof all - 6 * sizeof(long));
    int count = 0;
    while (count + 1 < MAX_ARGUMENTS && !(all[count] != all[count + 1] && is_zeroed_local((uintptr_t)all[count], (uintptr_t)stack) &&
                                          is_zeroed_local((uintptr_t)all[count + 1], (uintptr_t)stack)))
        count++;
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

/* ---- parameter handles ---- */

static void *handle(char *json) {
    Handle *made = malloc(sizeof *made);
    *made = (Handle){MAGIC, json, NULL, 0};
    return made;
}

static int destroy(const void *pointer) {
    Handle *old = (Handle *)pointer;
    if (!old || old->magic != MAGIC) return 0;
    for (uint64_t i = 0; i < old->count; i++) destroy(old->members[i]);
    old->magic = 0;
    free(old->members);
    free(old->json);
    free(old);
    return 0;
}

/* asprintf, or a small constant text while nothing is recorded: handles are made for every operator call. */
static char *json(const char *format, ...) {
    char *made = NULL;
    va_list arguments;
    va_start(arguments, format);
    if (!recording || vasprintf(&made, format, arguments) < 0) made = strdup("null");
    va_end(arguments);
    return made;
}

static char *integers(const int64_t *values, uint64_t count) {
    char *made = malloc(24 * (size_t)count + 3), *end = made;
    *end++ = '[';
    for (uint64_t i = 0; i < count; i++) end += sprintf(end, i ? ", %" PRId64 : "%" PRId64, values[i]);
    strcpy(end, "]");
    return made;
}

void *aclCreateTensor(const int64_t *shape, uint64_t dims, int dtype, const int64_t *stride, int64_t offset, int format,
                      const int64_t *storage, uint64_t storage_dims, void *data) {
    if (!recording) return handle(strdup("null"));
    char *a = integers(shape, dims), *b = integers(stride, dims), *c = integers(storage, storage_dims);
    char *made = json("{\"kind\": \"tensor\", \"shape\": %s, \"stride\": %s, \"dtype\": %d, \"format\": %d, \"offset\": %" PRId64
                      ", \"storage\": %s}", a, b, dtype, format, offset, c);
    free(a), free(b), free(c);
    return handle(made);
}

static void *list(const char *kind, char *values) {
    char *made = json("{\"kind\": \"%s\", \"values\": %s}", kind, values);
    free(values);
    return handle(made);
}

void *aclCreateIntArray(const int64_t *values, uint64_t count) { return list("ints", integers(values, count)); }

void *aclCreateBoolArray(const char *values, uint64_t count) {
    int64_t *wide = calloc((size_t)count + 1, sizeof *wide);
    for (uint64_t i = 0; i < count; i++) wide[i] = values[i] != 0;
    void *made = list("bools", integers(wide, count));
    free(wide);
    return made;
}

void *aclCreateFloatArray(const float *values, uint64_t count) {
    char *made = malloc(24 * (size_t)count + 3), *end = made;
    *end++ = '[';
    for (uint64_t i = 0; i < count; i++) end += sprintf(end, i ? ", %.9g" : "%.9g", (double)values[i]);
    strcpy(end, "]");
    return list("floats", made);
}

void *aclCreateScalar(const void *value, int dtype) {
    int64_t bits = 0;
    if (value) memcpy(&bits, value, dtype == ACL_FLOAT || dtype == ACL_INT32 ? 4 : dtype == ACL_BOOL ? 1 : 8);
    return handle(json("{\"kind\": \"scalar\", \"dtype\": %d, \"bits\": %" PRId64 "}", dtype, bits));
}

static void *handles(const char *kind, void *const *values, uint64_t count) {
    size_t size = 8;
    for (uint64_t i = 0; i < count; i++) size += (values[i] ? strlen(((Handle *)values[i])->json) : 4) + 2;
    char *made = malloc(size), *end = made;
    *end++ = '[';
    for (uint64_t i = 0; i < count; i++) end += sprintf(end, i ? ", %s" : "%s", values[i] ? ((Handle *)values[i])->json : "null");
    strcpy(end, "]");
    Handle *owner = list(kind, made);
    owner->members = malloc((size_t)(count + 1) * sizeof *owner->members);
    memcpy(owner->members, values, (size_t)count * sizeof *owner->members);
    owner->count = count;
    return owner;
}

void *aclCreateTensorList(void *const *values, uint64_t count) { return handles("tensors", values, count); }
void *aclCreateScalarList(void *const *values, uint64_t count) { return handles("scalars", values, count); }

int aclDestroyTensor(const void *p) { return destroy(p); }
int aclDestroyIntArray(const void *p) { return destroy(p); }
int aclDestroyBoolArray(const void *p) { return destroy(p); }
int aclDestroyFloatArray(const void *p) { return destroy(p); }
int aclDestroyScalar(const void *p) { return destroy(p); }
int aclDestroyTensorList(const void *p) { return destroy(p); }
int aclDestroyScalarList(const void *p) { return destroy(p); }
