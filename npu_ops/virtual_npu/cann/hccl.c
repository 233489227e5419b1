/* HCCL for the processes of one host: every communicator is a file in shared memory that all ranks map.
 *
 * torch_npu's own ProcessGroupHCCL runs on top of this unchanged. Each rank has a window of CHUNK bytes; a collective moves
 * data through the windows in rounds, all ranks in step. Reductions add the ranks in order, in fp32 for the 16-bit types,
 * so every rank gets the same bits in every run. Calls return when the data is there, as everything does on this device.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "runtime.h"

#define CHUNK ((size_t)1 << 20)   /* window of one rank; a multiple of every element size */
#define MAIL ((size_t)64 << 10)   /* window of one ordered pair of ranks */
#define ROOT_INFO 4108            /* size of HcclRootInfo */

/* From hccl_types.h, which C cannot include. */
enum { OK = 0, BAD_ARGUMENT = 1, NOT_SUPPORTED = 5, SYSCALL = 8, TIMEOUT = 9, REMOTE = 21 };
enum { SUM, PROD, MAX, MIN };
enum { INT8, INT16, INT32, FP16, FP32, INT64, UINT64, UINT8, UINT16, UINT32, FP64, BF16, INT128, HIF8 = 14, E4M3, E5M2, E8M0, TYPES };
static const size_t SIZES[TYPES] = {1, 2, 4, 2, 4, 8, 8, 1, 2, 4, 8, 2, 16, 0, 1, 1, 1, 1};

typedef struct { uint32_t full; uint32_t size; char data[MAIL]; } Mailbox;

typedef struct {
    uint32_t arrived, generation, failed, left;
    int32_t processes[MAX_DEVICES];
    uint64_t counts[MAX_DEVICES * MAX_DEVICES];
} Shared;

typedef struct {
    uint32_t ranks, rank;
    size_t size;
    Shared *shared;
    char *windows;
    Mailbox *mail;
    char name[128];
} Comm;

typedef struct { int receives; char *buffer; uint64_t count; int type; uint32_t peer; } Item;  /* HcclSendRecvItem */

/* ---- waiting ---- */

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static double patience(void) {
    const char *text = getenv("HCCL_EXEC_TIMEOUT");
    double value = text ? atof(text) : 0;
    return value > 0 ? value : 1836;  /* HCCL's default */
}

/* Gone, or a zombie that its parent has not collected yet. */
static int is_dead(int32_t process) {
    char path[64], status[256];
    snprintf(path, sizeof path, "/proc/%d/stat", process);
    FILE *file = fopen(path, "r");
    if (!file) return kill(process, 0) && errno == ESRCH;
    size_t size = fread(status, 1, sizeof status - 1, file);
    fclose(file);
    status[size] = 0;
    char *end = strrchr(status, ')');
    return end && (end[2] == 'Z' || end[2] == 'X');
}

/* Whether to give up waiting: a rank failed, died, or took too long. */
static int trouble(Comm *comm, double since) {
    if (__atomic_load_n(&comm->shared->failed, __ATOMIC_ACQUIRE)) return REMOTE;
    for (uint32_t i = 0; i < comm->ranks; i++) {
        int32_t process = __atomic_load_n(&comm->shared->processes[i], __ATOMIC_RELAXED);
        if (!process || !is_dead(process)) continue;
        fprintf(stderr, "virtual NPU: rank %u of communicator %s (process %d) has ended\n", i, comm->name, process);
        __atomic_store_n(&comm->shared->failed, 1, __ATOMIC_RELEASE);
        return REMOTE;
    }
    return seconds() - since > patience() ? TIMEOUT : OK;
}

static void nap(uint32_t *word, uint32_t value) {
    struct timespec limit = {0, 50000000};
    syscall(SYS_futex, word, FUTEX_WAIT, value, &limit, NULL, 0);
}
static void wake(uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE, MAX_DEVICES, NULL, NULL, 0); }

static int barrier(Comm *comm) {
    Shared *shared = comm->shared;
    uint32_t generation = __atomic_load_n(&shared->generation, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&shared->arrived, 1, __ATOMIC_ACQ_REL) == comm->ranks) {
        __atomic_store_n(&shared->arrived, 0, __ATOMIC_RELAXED);
        __atomic_add_fetch(&shared->generation, 1, __ATOMIC_RELEASE);
        wake(&shared->generation);
        return OK;
    }
    double since = seconds();
    for (int turn = 0; __atomic_load_n(&shared->generation, __ATOMIC_ACQUIRE) == generation; turn++) {
        if (turn < 50) {
            sched_yield();
            continue;
        }
        nap(&shared->generation, generation);
        int reason = trouble(comm, since);
        if (reason && __atomic_load_n(&shared->generation, __ATOMIC_ACQUIRE) == generation) return reason;
    }
    return OK;
}

#define TRY(call) do { int result_ = (call); if (result_) return result_; } while (0)

/* ---- communicators ---- */

int HcclGetRootInfo(char *info) {
    static uint32_t made;
    const char *folder = access("/dev/shm", W_OK) ? "/tmp" : "/dev/shm";
    memset(info, 0, ROOT_INFO);
    snprintf(info, ROOT_INFO, "%s/virtual-npu-%d-%u-%lx", folder, getpid(), __atomic_add_fetch(&made, 1, __ATOMIC_RELAXED),
             (unsigned long)(seconds() * 1e9));
    return OK;
}

int HcclCommInitRootInfo(uint32_t ranks, const char *info, uint32_t rank, Comm **made) {
    if (!ranks || ranks > MAX_DEVICES || rank >= ranks) return BAD_ARGUMENT;
    int file = open(info, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0) return SYSCALL;
    size_t header = (sizeof(Shared) + 4095) / 4096 * 4096;
    size_t size = header + ranks * CHUNK + (size_t)ranks * ranks * sizeof(Mailbox);
    void *start = ftruncate(file, (off_t)size) ? MAP_FAILED : mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (start == MAP_FAILED) return SYSCALL;
    Comm *comm = calloc(1, sizeof *comm);
    *comm = (Comm){ranks, rank, size, start, (char *)start + header, (Mailbox *)((char *)start + header + ranks * CHUNK), ""};
    snprintf(comm->name, sizeof comm->name, "%s", strrchr(info, '/') + 1);
    __atomic_store_n(&comm->shared->processes[rank], getpid(), __ATOMIC_RELEASE);
    TRY(barrier(comm));
    if (rank == 0) unlink(info);  /* everybody has it mapped; nothing is left behind */
    *made = comm;
    return OK;
}

int HcclCommInitRootInfoConfig(uint32_t ranks, const char *info, uint32_t rank, const void *config, Comm **made) {
    return HcclCommInitRootInfo(ranks, info, rank, made);
}

int HcclCommDestroy(Comm *comm) {
    /* Leaving is no failure: peers that still wait for this rank learn of it when the process ends. */
    __atomic_store_n(&comm->shared->processes[comm->rank], 0, __ATOMIC_RELEASE);
    munmap(comm->shared, comm->size);
    free(comm);
    return OK;
}

uint32_t HcclGetCommConfigCapability(void) { return 12; }
int HcclSetConfig(int config, int value) { return OK; }
int HcclGetConfig(int config, int *value) { *value = 1; return OK; }
int HcclGetRankSize(Comm *comm, uint32_t *ranks) { *ranks = comm->ranks; return OK; }
int HcclGetRankId(Comm *comm, uint32_t *rank) { *rank = comm->rank; return OK; }
int HcclGetCommName(Comm *comm, char *name) { strcpy(name, comm->name); return OK; }

int HcclGetCommAsyncError(Comm *comm, int *error) {
    *error = __atomic_load_n(&comm->shared->failed, __ATOMIC_ACQUIRE) ? REMOTE : OK;
    return OK;
}

/* ---- reductions ---- */

static float from_bf16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

static uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (value != value) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);  /* to nearest, ties to even */
}

static float from_fp16(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 1023, wide;
    float value;
    if (exponent == 0) {
        value = (float)fraction * 0x1p-24f;
        return sign ? -value : value;
    }
    wide = sign | (exponent == 31 ? 0x7f800000 : (exponent + 112) << 23) | fraction << 13;
    memcpy(&value, &wide, sizeof value);
    return value;
}

static uint16_t to_fp16(float value) {
    uint32_t bits, sign;
    memcpy(&bits, &value, sizeof bits);
    sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (bits >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (bits < 0x38800000) {  /* subnormal: adding 0.5 leaves the rounded fraction in the lowest bits */
        float small;
        memcpy(&small, &bits, sizeof small);
        small += 0.5f;
        memcpy(&bits, &small, sizeof bits);
        return (uint16_t)(sign | (bits - 0x3f000000));
    }
    return (uint16_t)(sign | ((bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13));
}

#define SAME(x) (x)
/* NaN stays NaN in max and min, as in PyTorch. */
#define FOLD(type, wide, load, store)                                                                  \
    for (size_t i = 0; i < size / sizeof(type); i++) {                                                 \
        wide total = load(((const type *)comm->windows)[i]);                                           \
        for (uint32_t r = 1; r < comm->ranks; r++) {                                                   \
            wide next = load(((const type *)(comm->windows + r * CHUNK))[i]);                          \
            total = op == SUM ? total + next : op == PROD ? total * next                               \
                  : next != next ? next : op == MAX ? (next > total ? next : total)                    \
                  : (next < total ? next : total);                                                     \
        }                                                                                              \
        ((type *)to)[i] = store(total);                                                                \
    }                                                                                                  \
    return OK

/* Reduce the first `size` bytes of all windows into `to`. */
static int fold(Comm *comm, char *to, size_t size, int type, int op) {
    if (op < SUM || op > MIN) return NOT_SUPPORTED;
    switch (type) {
        case INT8: FOLD(int8_t, int8_t, SAME, SAME);
        case UINT8: FOLD(uint8_t, uint8_t, SAME, SAME);
        case INT16: FOLD(int16_t, int16_t, SAME, SAME);
        case UINT16: FOLD(uint16_t, uint16_t, SAME, SAME);
        case INT32: FOLD(int32_t, int32_t, SAME, SAME);
        case UINT32: FOLD(uint32_t, uint32_t, SAME, SAME);
        case INT64: FOLD(int64_t, int64_t, SAME, SAME);
        case UINT64: FOLD(uint64_t, uint64_t, SAME, SAME);
        case FP32: FOLD(float, float, SAME, SAME);
        case FP64: FOLD(double, double, SAME, SAME);
        case FP16: FOLD(uint16_t, float, from_fp16, to_fp16);
        case BF16: FOLD(uint16_t, float, from_bf16, to_bf16);
        default: return NOT_SUPPORTED;
    }
}

/* ---- collectives ---- */

static size_t part(size_t total, size_t done) { return total - done < CHUNK ? total - done : CHUNK; }
static char *window(Comm *comm, uint32_t rank) { return comm->windows + rank * CHUNK; }

static int size_of(uint64_t count, int type, size_t *size) {
    if (type < 0 || type >= TYPES || !SIZES[type]) return NOT_SUPPORTED;
    *size = (size_t)count * SIZES[type];
    return OK;
}

/* Reduce `total` bytes of all ranks' `from`; ranks with a `to` get the result. */
static int reduce(Comm *comm, const char *from, char *to, size_t total, int type, int op) {
    for (size_t done = 0; done < total; done += CHUNK) {
        size_t size = part(total, done);
        memcpy(window(comm, comm->rank), from + done, size);
        TRY(barrier(comm));
        if (to) TRY(fold(comm, to + done, size, type, op));
        TRY(barrier(comm));
    }
    return OK;
}

/* `total` bytes of rank `root` to every rank with a `to`. */
static int spread(Comm *comm, const char *from, char *to, size_t total, uint32_t root) {
    if (root >= comm->ranks) return BAD_ARGUMENT;
    for (size_t done = 0; done < total; done += CHUNK) {
        size_t size = part(total, done);
        if (comm->rank == root) memcpy(window(comm, root), from + done, size);
        TRY(barrier(comm));
        if (to) memmove(to + done, window(comm, root), size);
        TRY(barrier(comm));
    }
    return OK;
}

int HcclBarrier(Comm *comm, void *stream) { return barrier(comm); }

int HcclAllReduce(const void *from, void *to, uint64_t count, int type, int op, Comm *comm, void *stream) {
    size_t size;
    TRY(size_of(count, type, &size));
    return reduce(comm, from, to, size, type, op);
}

int HcclReduce(const void *from, void *to, uint64_t count, int type, int op, uint32_t root, Comm *comm, void *stream) {
    size_t size;
    TRY(size_of(count, type, &size));
    return reduce(comm, from, comm->rank == root ? to : NULL, size, type, op);
}

int HcclReduceScatter(const char *from, char *to, uint64_t count, int type, int op, Comm *comm, void *stream) {
    size_t size;
    TRY(size_of(count, type, &size));
    for (uint32_t r = 0; r < comm->ranks; r++) TRY(reduce(comm, from + r * size, r == comm->rank ? to : NULL, size, type, op));
    return OK;
}

int HcclReduceScatterV(const char *from, const uint64_t *counts, const uint64_t *offsets, char *to, uint64_t count, int type,
                       int op, Comm *comm, void *stream) {
    size_t size, offset;
    for (uint32_t r = 0; r < comm->ranks; r++) {
        TRY(size_of(counts[r], type, &size));
        TRY(size_of(offsets[r], type, &offset));
        TRY(reduce(comm, from + offset, r == comm->rank ? to : NULL, size, type, op));
    }
    return OK;
}

int HcclBroadcast(void *buffer, uint64_t count, int type, uint32_t root, Comm *comm, void *stream) {
    size_t size;
    TRY(size_of(count, type, &size));
    return spread(comm, buffer, comm->rank == root ? NULL : buffer, size, root);
}

int HcclScatter(const char *from, char *to, uint64_t count, int type, uint32_t root, Comm *comm, void *stream) {
    size_t size;
    TRY(size_of(count, type, &size));
    for (uint32_t r = 0; r < comm->ranks; r++) TRY(spread(comm, from + r * size, r == comm->rank ? to : NULL, size, root));
    return OK;
}

int HcclAllGather(const char *from, char *to, uint64_t count, int type, Comm *comm, void *stream) {
    size_t size;
    TRY(size_of(count, type, &size));
    for (size_t done = 0; done < size; done += CHUNK) {
        memcpy(window(comm, comm->rank), from + done, part(size, done));
        TRY(barrier(comm));
        for (uint32_t r = 0; r < comm->ranks; r++) memcpy(to + r * size + done, window(comm, r), part(size, done));
        TRY(barrier(comm));
    }
    return OK;
}

int HcclAllGatherV(const char *from, uint64_t count, char *to, const uint64_t *counts, const uint64_t *offsets, int type,
                   Comm *comm, void *stream) {
    size_t size, offset;
    for (uint32_t r = 0; r < comm->ranks; r++) {
        TRY(size_of(counts[r], type, &size));
        TRY(size_of(offsets[r], type, &offset));
        TRY(spread(comm, from, to + offset, size, r));
    }
    return OK;
}

/* Byte counts and offsets by peer. What the others send to whom decides the number of rounds, so all ranks publish it first. */
static int exchange(Comm *comm, const char *from, const size_t *sizes, const size_t *starts, char *to, const size_t *into) {
    uint64_t *counts = comm->shared->counts;
    for (uint32_t r = 0; r < comm->ranks; r++) counts[comm->rank * comm->ranks + r] = sizes[r];
    TRY(barrier(comm));
    for (uint32_t receiver = 0; receiver < comm->ranks; receiver++) {
        size_t longest = 0;
        for (uint32_t r = 0; r < comm->ranks; r++) {
            size_t count = counts[r * comm->ranks + receiver];
            if (count > longest) longest = count;
        }
        for (size_t done = 0; done < longest; done += CHUNK) {
            if (done < sizes[receiver]) {
                memcpy(window(comm, comm->rank), from + starts[receiver] + done, part(sizes[receiver], done));
            }
            TRY(barrier(comm));
            for (uint32_t r = 0; receiver == comm->rank && r < comm->ranks; r++) {
                size_t total = counts[r * comm->ranks + receiver];
                if (done < total) memcpy(to + into[r] + done, window(comm, r), part(total, done));
            }
            TRY(barrier(comm));
        }
    }
    return barrier(comm);  /* nobody publishes the next counts before all have read these */
}

int HcclAlltoAllV(const void *from, const uint64_t *counts, const uint64_t *offsets, int type, void *to,
                  const uint64_t *to_counts, const uint64_t *to_offsets, int to_type, Comm *comm, void *stream) {
    size_t sizes[MAX_DEVICES], starts[MAX_DEVICES], into[MAX_DEVICES];
    for (uint32_t r = 0; r < comm->ranks; r++) {
        TRY(size_of(counts[r], type, &sizes[r]));
        TRY(size_of(offsets[r], type, &starts[r]));
        TRY(size_of(to_offsets[r], to_type, &into[r]));
    }
    return exchange(comm, from, sizes, starts, to, into);
}

int HcclAlltoAll(const void *from, uint64_t count, int type, void *to, uint64_t to_count, int to_type, Comm *comm,
                 void *stream) {
    size_t sizes[MAX_DEVICES], starts[MAX_DEVICES], size;
    TRY(size_of(count, type, &size));
    for (uint32_t r = 0; r < comm->ranks; r++) sizes[r] = size, starts[r] = r * size;
    return exchange(comm, from, sizes, starts, to, starts);
}

/* ---- point to point: all transfers of a batch move at once, so that two ranks may send to each other ---- */

int HcclBatchSendRecv(Item *items, uint32_t count, Comm *comm, void *stream) {
    size_t *sizes = calloc(count, sizeof *sizes), *done = calloc(count, sizeof *done);
    uint32_t open = 0;
    int result = OK;
    for (uint32_t i = 0; i < count && !result; i++) {
        result = items[i].peer < comm->ranks ? size_of(items[i].count, items[i].type, &sizes[i]) : BAD_ARGUMENT;
        open += sizes[i] > 0;
    }
    double since = seconds();
    for (uint32_t idle = 0; open && !result;) {
        int moved = 0;
        for (uint32_t i = 0; i < count; i++) {
            if (done[i] == sizes[i]) continue;
            int receives = items[i].receives, busy = 0;
            /* Of several transfers with one peer in one direction the first goes first. */
            for (uint32_t j = 0; j < i; j++) {
                busy |= done[j] < sizes[j] && items[j].receives == receives && items[j].peer == items[i].peer;
            }
            uint32_t sender = receives ? items[i].peer : comm->rank, receiver = receives ? comm->rank : items[i].peer;
            Mailbox *box = &comm->mail[sender * comm->ranks + receiver];
            if (busy || __atomic_load_n(&box->full, __ATOMIC_ACQUIRE) != (uint32_t)receives) continue;
            if (receives) {
                if (box->size > sizes[i] - done[i]) {
                    result = BAD_ARGUMENT;  /* more was sent than is expected */
                    break;
                }
                memcpy(items[i].buffer + done[i], box->data, box->size);
            } else {
                box->size = (uint32_t)(sizes[i] - done[i] < MAIL ? sizes[i] - done[i] : MAIL);
                memcpy(box->data, items[i].buffer + done[i], box->size);
            }
            done[i] += box->size;
            __atomic_store_n(&box->full, (uint32_t)!receives, __ATOMIC_RELEASE);
            open -= done[i] == sizes[i];
            moved = 1;
        }
        if (moved) idle = 0;
        else if (++idle < 200) sched_yield();
        else {
            usleep(200);
            if (idle % 200 == 0) result = trouble(comm, since);
        }
    }
    free(sizes), free(done);
    return result;
}

/* Between GroupStart and GroupEnd transfers wait, and then move together. */
static _Thread_local struct { int depth; uint32_t count; struct { Item item; Comm *comm; } waiting[1024]; } group;

int HcclGroupStart(void) {
    group.depth++;
    return OK;
}

int HcclGroupEnd(void) {
    if (!group.depth || --group.depth) return OK;
    int result = OK;
    while (group.count && !result) {  /* one communicator after the other */
        static _Thread_local Item batch[1024];
        Comm *comm = group.waiting[0].comm;
        uint32_t taken = 0, left = 0;
        for (uint32_t i = 0; i < group.count; i++) {
            if (group.waiting[i].comm == comm) batch[taken++] = group.waiting[i].item;
            else group.waiting[left++] = group.waiting[i];
        }
        group.count = left;
        result = HcclBatchSendRecv(batch, taken, comm, NULL);
    }
    group.count = 0;
    return result;
}

static int transfer(Item item, Comm *comm) {
    if (!group.depth) return HcclBatchSendRecv(&item, 1, comm, NULL);
    if (group.count == 1024) return NOT_SUPPORTED;
    group.waiting[group.count].item = item;
    group.waiting[group.count++].comm = comm;
    return OK;
}

int HcclSend(void *buffer, uint64_t count, int type, uint32_t peer, Comm *comm, void *stream) {
    return transfer((Item){0, buffer, count, type, peer}, comm);
}

int HcclRecv(void *buffer, uint64_t count, int type, uint32_t peer, Comm *comm, void *stream) {
    return transfer((Item){1, buffer, count, type, peer}, comm);
}
