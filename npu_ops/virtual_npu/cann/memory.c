/* Device memory is host memory, counted and limited per device; pages that nobody touches cost nothing. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "runtime.h"

#define ALIGNMENT 512  /* CANN's own; a block is preceded by a header of this size */

typedef struct Block {
    struct Block *next, *previous;
    size_t size;
    int device;
} Block;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Block blocks = {&blocks, &blocks, 0, -1};

/* Take bytes from a device, or say that it has no more. */
static int take(int device, size_t size) {
    pthread_mutex_lock(&lock);
    int fits = size <= settings.memory - devices[device].used;
    if (fits) devices[device].used += size;
    pthread_mutex_unlock(&lock);
    return fits;
}

static void give(int device, size_t size) {
    pthread_mutex_lock(&lock);
    devices[device].used -= size;
    pthread_mutex_unlock(&lock);
}

aclError aclrtMalloc(void **pointer, size_t size, aclrtMemMallocPolicy policy) {
    int device = current_device();
    if (device < 0) return ACL_ERROR_RT_CONTEXT_NULL;
    size = (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (!take(device, size)) return ACL_ERROR_RT_MEMORY_ALLOCATION;
    Block *block = aligned_alloc(ALIGNMENT, size + ALIGNMENT);
    if (!block) {
        give(device, size);
        return ACL_ERROR_RT_MEMORY_ALLOCATION;
    }
    block->size = size;
    block->device = device;
    pthread_mutex_lock(&lock);
    block->next = blocks.next;
    block->previous = &blocks;
    blocks.next->previous = block;
    blocks.next = block;
    pthread_mutex_unlock(&lock);
    *pointer = (char *)block + ALIGNMENT;
    return ACL_SUCCESS;
}
aclError aclrtMallocAlign32(void **pointer, size_t size, aclrtMemMallocPolicy policy) { return aclrtMalloc(pointer, size, policy); }

aclError aclrtFree(void *pointer) {
    if (!pointer) return ACL_ERROR_RT_PARAM_INVALID;
    Block *block = (Block *)((char *)pointer - ALIGNMENT);
    pthread_mutex_lock(&lock);
    block->next->previous = block->previous;
    block->previous->next = block->next;
    devices[block->device].used -= block->size;
    pthread_mutex_unlock(&lock);
    free(block);
    return ACL_SUCCESS;
}

aclError aclrtGetMemInfo(aclrtMemAttr attribute, size_t *available, size_t *total) {
    /* torch_npu asks this before it has picked a device, when device 0 is meant. */
    int device = current_device() < 0 ? 0 : current_device();
    pthread_mutex_lock(&lock);
    *available = settings.memory - devices[device].used;
    *total = settings.memory;
    pthread_mutex_unlock(&lock);
    return ACL_SUCCESS;
}

aclError aclrtPointerGetAttributes(const void *pointer, aclrtPtrAttributes *attributes) {
    memset(attributes, 0, sizeof *attributes);
    attributes->location.type = ACL_MEM_LOCATION_TYPE_UNREGISTERED;
    pthread_mutex_lock(&lock);
    for (Block *block = blocks.next; block != &blocks; block = block->next) {
        const char *start = (const char *)block + ALIGNMENT;
        if ((const char *)pointer < start || (const char *)pointer >= start + block->size) continue;
        attributes->location.type = ACL_MEM_LOCATION_TYPE_DEVICE;
        attributes->location.id = (uint32_t)block->device;
    }
    pthread_mutex_unlock(&lock);
    return ACL_SUCCESS;
}

/* ---- pinned host memory ---- */

aclError aclrtMallocHost(void **pointer, size_t size) {
    *pointer = aligned_alloc(ALIGNMENT, (size + ALIGNMENT) / ALIGNMENT * ALIGNMENT);
    return *pointer ? ACL_SUCCESS : ACL_ERROR_RT_MEMORY_ALLOCATION;
}
aclError aclrtMallocHostWithCfg(void **pointer, uint64_t size, aclrtMallocConfig *config) { return aclrtMallocHost(pointer, size); }
aclError aclrtFreeHost(void *pointer) { free(pointer); return ACL_SUCCESS; }
aclError aclrtHostRegister(void *pointer, uint64_t size, aclrtHostRegisterType type, void **device_pointer) {
    *device_pointer = pointer;
    return ACL_SUCCESS;
}

/* ---- copies: done before they return, whatever the stream ---- */

aclError aclrtMemcpy(void *to, size_t room, const void *from, size_t size, aclrtMemcpyKind kind) {
    if (size > room) return ACL_ERROR_RT_PARAM_INVALID;
    if (size) memmove(to, from, size);
    return ACL_SUCCESS;
}
aclError aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t size, aclrtMemcpyKind kind, aclrtStream stream) {
    return aclrtMemcpy(to, room, from, size, kind);
}
aclError aclrtMemcpyAsyncWithCondition(void *to, size_t room, const void *from, size_t size, aclrtMemcpyKind kind,
                                       aclrtStream stream) {
    return aclrtMemcpy(to, room, from, size, kind);
}
aclError aclrtMemcpyBatch(void **to, size_t *rooms, void **from, size_t *sizes, size_t count, aclrtMemcpyBatchAttr *attributes,
                          size_t *indexes, size_t attribute_count, size_t *failed) {
    for (size_t i = 0; i < count; i++) {
        if (aclrtMemcpy(to[i], rooms[i], from[i], sizes[i], ACL_MEMCPY_DEFAULT)) {
            *failed = i;
            return ACL_ERROR_RT_PARAM_INVALID;
        }
    }
    return ACL_SUCCESS;
}
aclError aclrtMemcpyBatchAsync(void **to, size_t *rooms, void **from, size_t *sizes, size_t count,
                               aclrtMemcpyBatchAttr *attributes, size_t *indexes, size_t attribute_count, size_t *failed,
                               aclrtStream stream) {
    return aclrtMemcpyBatch(to, rooms, from, sizes, count, attributes, indexes, attribute_count, failed);
}
aclError aclrtMemset(void *pointer, size_t room, int32_t value, size_t size) {
    if (size > room) return ACL_ERROR_RT_PARAM_INVALID;
    memset(pointer, value, size);
    return ACL_SUCCESS;
}
aclError aclrtMemsetAsync(void *pointer, size_t room, int32_t value, size_t size, aclrtStream stream) {
    return aclrtMemset(pointer, room, value, size);
}

/* ---- virtual addresses apart from physical memory (expandable segments, sleep mode) ---- */

typedef struct {
    int file;
    int device;
    size_t size;
} Physical;

/* Sizes by address, because release and unmap name an address alone. */
typedef struct { void *address; size_t size; } Range;
static Range reserved[4096], mapped[65536];

static Range *find(Range *ranges, size_t count, void *address) {
    for (size_t i = 0; i < count; i++) {
        if (ranges[i].address == address) return &ranges[i];
    }
    return NULL;
}
#define FIND(ranges, address) find(ranges, sizeof ranges / sizeof *ranges, address)

aclError aclrtReserveMemAddress(void **pointer, size_t size, size_t alignment, void *wanted, uint64_t flags) {
    void *made = mmap(wanted, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (made == MAP_FAILED) return ACL_ERROR_RT_MEMORY_ALLOCATION;
    pthread_mutex_lock(&lock);
    Range *slot = FIND(reserved, NULL);
    if (slot) *slot = (Range){made, size};
    pthread_mutex_unlock(&lock);
    if (!slot) {
        munmap(made, size);
        return ACL_ERROR_RT_MEMORY_ALLOCATION;
    }
    *pointer = made;
    return ACL_SUCCESS;
}

aclError aclrtReleaseMemAddress(void *pointer) {
    pthread_mutex_lock(&lock);
    Range *range = pointer ? FIND(reserved, pointer) : NULL;
    if (range) munmap(pointer, range->size), range->address = NULL;
    pthread_mutex_unlock(&lock);
    return range ? ACL_SUCCESS : ACL_ERROR_RT_PARAM_INVALID;
}

aclError aclrtMallocPhysical(aclrtDrvMemHandle *handle, size_t size, const aclrtPhysicalMemProp *property, uint64_t flags) {
    int device = (int)property->location.id;
    if (device >= settings.devices) return ACL_ERROR_RT_INVALID_DEVICEID;
    if (!take(device, size)) return ACL_ERROR_RT_MEMORY_ALLOCATION;
    Physical *made = malloc(sizeof *made);
    *made = (Physical){memfd_create("virtual-npu", MFD_CLOEXEC), device, size};
    if (made->file < 0 || ftruncate(made->file, (off_t)size)) {
        give(device, size);
        if (made->file >= 0) close(made->file);
        free(made);
        return ACL_ERROR_RT_MEMORY_ALLOCATION;
    }
    *handle = (aclrtDrvMemHandle)made;
    return ACL_SUCCESS;
}

aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
    Physical *physical = (Physical *)handle;
    give(physical->device, physical->size);
    close(physical->file);
    free(physical);
    return ACL_SUCCESS;
}

aclError aclrtMapMem(void *pointer, size_t size, size_t offset, aclrtDrvMemHandle handle, uint64_t flags) {
    int file = ((Physical *)handle)->file;
    pthread_mutex_lock(&lock);
    Range *slot = FIND(mapped, NULL);
    void *made = slot ? mmap(pointer, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, (off_t)offset) : MAP_FAILED;
    if (made != MAP_FAILED) *slot = (Range){pointer, size};
    pthread_mutex_unlock(&lock);
    return made == MAP_FAILED ? ACL_ERROR_RT_MEMORY_ALLOCATION : ACL_SUCCESS;
}

aclError aclrtUnmapMem(void *pointer) {
    pthread_mutex_lock(&lock);
    Range *range = pointer ? FIND(mapped, pointer) : NULL;
    if (range) {
        /* The addresses stay reserved. */
        mmap(pointer, range->size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        range->address = NULL;
    }
    pthread_mutex_unlock(&lock);
    return range ? ACL_SUCCESS : ACL_ERROR_RT_PARAM_INVALID;
}
