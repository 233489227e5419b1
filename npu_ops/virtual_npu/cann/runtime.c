/* Devices, contexts, streams, events and properties of the stand-in CANN runtime.
 *
 * Work is done by the thread that submits it, before the submitting call returns. So streams keep their order by
 * construction, every event is complete as soon as it is recorded, and waiting for anything returns at once.
 */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "acl/acl_op_compiler.h"
#include "runtime.h"

Settings settings = {1, (size_t)16 << 30, "Ascend910B3", "9.1.0", 20, 40};
Device devices[MAX_DEVICES];
static _Thread_local int current = -1;

/* Called by npu_ops.virtual_npu before torch_npu is loaded; it has validated the values. */
void virtual_npu_configure(int count, size_t memory, const char *soc, const char *cann, int cube_cores, int vector_cores) {
    settings.devices = count;
    settings.memory = memory;
    settings.cube_cores = cube_cores;
    settings.vector_cores = vector_cores;
    strncpy(settings.soc, soc, sizeof settings.soc - 1);
    strncpy(settings.cann, cann, sizeof settings.cann - 1);
}

int current_device(void) { return current; }

/* ---- devices and contexts: a context is the address of its device ---- */

aclError aclrtGetDeviceCount(uint32_t *count) {
    *count = (uint32_t)settings.devices;
    return ACL_SUCCESS;
}

aclError aclrtSetDevice(int32_t device) {
    if (device < 0 || device >= settings.devices) return ACL_ERROR_RT_INVALID_DEVICEID;
    devices[device].active = 1;
    current = device;
    return ACL_SUCCESS;
}

aclError aclrtGetDevice(int32_t *device) {
    if (current < 0) return ACL_ERROR_RT_CONTEXT_NULL;
    *device = current;
    return ACL_SUCCESS;
}

aclError aclrtResetDevice(int32_t device) {
    if (device < 0 || device >= settings.devices) return ACL_ERROR_RT_INVALID_DEVICEID;
    return ACL_SUCCESS;
}

aclError aclrtGetCurrentContext(aclrtContext *context) {
    if (current < 0) return ACL_ERROR_RT_CONTEXT_NULL;
    *context = &devices[current];
    return ACL_SUCCESS;
}

aclError aclrtSetCurrentContext(aclrtContext context) {
    ptrdiff_t index = (Device *)context - devices;
    if (index < 0 || index >= settings.devices) return ACL_ERROR_RT_CONTEXT_NULL;
    return aclrtSetDevice((int32_t)index);
}

aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *active) {
    if (device < 0 || device >= settings.devices) return ACL_ERROR_RT_INVALID_DEVICEID;
    if (flags) *flags = 0;
    if (active) *active = devices[device].active;
    return ACL_SUCCESS;
}

aclError aclrtDeviceCanAccessPeer(int32_t *can, int32_t device, int32_t peer) {
    *can = device != peer;
    return ACL_SUCCESS;
}

aclError aclrtGetLogicDevIdByUserDevId(const int32_t user, int32_t *const logic) {
    *logic = user;
    return ACL_SUCCESS;
}

aclError aclrtDeviceGetUuid(int32_t device, aclrtUuid *uuid) {
    memset(uuid, 0, sizeof *uuid);
    memcpy(uuid->bytes, "virtual-npu", 11);
    uuid->bytes[15] = (char)device;
    return ACL_SUCCESS;
}

/* ---- what kind of device it is ---- */

const char *aclrtGetSocName(void) { return settings.soc; }

aclError aclsysGetVersionStr(char *package, char *version) {
    strcpy(version, settings.cann);
    return ACL_SUCCESS;
}

aclError aclsysGetCANNVersion(aclCANNPackageName name, aclCANNPackageVersion *version) {
    memset(version, 0, sizeof *version);
    strncpy(version->version, settings.cann, sizeof version->version - 1);
    return ACL_SUCCESS;
}

aclError aclrtGetDeviceInfo(uint32_t device, aclrtDevAttr attribute, int64_t *value) {
    switch (attribute) {
        case ACL_DEV_ATTR_AICORE_CORE_NUM:
        case ACL_DEV_ATTR_CUBE_CORE_NUM: *value = settings.cube_cores; break;
        case ACL_DEV_ATTR_VECTOR_CORE_NUM: *value = settings.vector_cores; break;
        case ACL_DEV_ATTR_AICPU_CORE_NUM: *value = 6; break;
        case ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE: *value = (int64_t)settings.memory; break;
        case ACL_DEV_ATTR_L2_CACHE_SIZE: *value = (int64_t)192 << 20; break;
        case ACL_DEV_ATTR_UBUF_PER_VECTOR_CORE: *value = 192 << 10; break;
        case ACL_DEV_ATTR_PHY_CHIP_ID: *value = device; break;
        default: *value = 0;
    }
    return ACL_SUCCESS;
}

aclError aclGetDeviceCapability(uint32_t device, aclDeviceInfo info, int64_t *value) {
    *value = info == ACL_DEVICE_INFO_L2_SIZE ? (int64_t)192 << 20
             : info == ACL_DEVICE_INFO_VECTOR_CORE_NUM ? settings.vector_cores : settings.cube_cores;
    return ACL_SUCCESS;
}

static aclError cores(aclrtDevResLimitType type, uint32_t *value) {
    *value = (uint32_t)(type == ACL_RT_DEV_RES_CUBE_CORE ? settings.cube_cores : settings.vector_cores);
    return ACL_SUCCESS;
}
aclError aclrtGetDeviceResLimit(int32_t device, aclrtDevResLimitType type, uint32_t *value) { return cores(type, value); }
aclError aclrtGetStreamResLimit(aclrtStream stream, aclrtDevResLimitType type, uint32_t *value) { return cores(type, value); }
aclError aclrtGetResInCurrentThread(aclrtDevResLimitType type, uint32_t *value) { return cores(type, value); }

aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t *value) {
    *value = 0;
    return ACL_SUCCESS;
}

size_t aclGetCompileoptSize(aclCompileOpt option) { return 16; }
aclError aclGetCompileopt(aclCompileOpt option, char *value, size_t length) {
    if (length) memset(value, 0, length), strncpy(value, "disable", length - 1);
    return ACL_SUCCESS;
}

/* ---- streams ---- */

typedef struct { int32_t id; } Stream;
static int32_t streams_made;

aclError aclrtCreateStream(aclrtStream *stream) {
    Stream *made = calloc(1, sizeof *made);
    made->id = __atomic_add_fetch(&streams_made, 1, __ATOMIC_RELAXED);
    *stream = made;
    return ACL_SUCCESS;
}
aclError aclrtCreateStreamWithConfig(aclrtStream *stream, uint32_t priority, uint32_t flag) { return aclrtCreateStream(stream); }
aclError aclrtDestroyStream(aclrtStream stream) { free(stream); return ACL_SUCCESS; }
aclError aclrtDestroyStreamForce(aclrtStream stream) { return aclrtDestroyStream(stream); }

aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus *status) {
    *status = ACL_STREAM_STATUS_COMPLETE;
    return ACL_SUCCESS;
}
aclError aclrtStreamGetId(aclrtStream stream, int32_t *id) {
    *id = stream ? ((Stream *)stream)->id : 0;
    return ACL_SUCCESS;
}
aclError aclrtGetStreamOverflowSwitch(aclrtStream stream, uint32_t *flag) {
    *flag = 0;
    return ACL_SUCCESS;
}

/* No stream is ever captured: graphs are not supported. */
aclError aclmdlRICaptureGetInfo(aclrtStream stream, aclmdlRICaptureStatus *status, aclmdlRI *model) {
    if (status) *status = ACL_MODEL_RI_CAPTURE_STATUS_NONE;
    if (model) *model = NULL;
    return ACL_SUCCESS;
}

/* Callbacks run where they are launched: everything before them on the stream has been done. */
aclError aclrtLaunchCallback(aclrtCallback function, void *data, aclrtCallbackBlockType blocks, aclrtStream stream) {
    function(data);
    return ACL_SUCCESS;
}
aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc function, void *data) {
    function(data);
    return ACL_SUCCESS;
}

/* ---- events ---- */

typedef struct { uint64_t microseconds; } Event;  /* 0: never recorded */

aclError aclrtCreateEvent(aclrtEvent *event) {
    *event = calloc(1, sizeof(Event));
    return ACL_SUCCESS;
}
aclError aclrtCreateEventWithFlag(aclrtEvent *event, uint32_t flag) { return aclrtCreateEvent(event); }
aclError aclrtCreateEventExWithFlag(aclrtEvent *event, uint32_t flag) { return aclrtCreateEvent(event); }
aclError aclrtDestroyEvent(aclrtEvent event) { free(event); return ACL_SUCCESS; }

aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    ((Event *)event)->microseconds = (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
    return ACL_SUCCESS;
}
aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus *status) {
    *status = ACL_EVENT_RECORDED_STATUS_COMPLETE;
    return ACL_SUCCESS;
}
aclError aclrtQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus *status) {
    *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
    return ACL_SUCCESS;
}
/* The names of both queries in older runtimes, which torch_npu looks up as well. */
int aclQueryEventRecordedStatus(void *event, int *status) { return aclrtQueryEventStatus(event, (aclrtEventRecordedStatus *)status); }
int aclQueryEventWaitStatus(void *event, int *status) { return aclrtQueryEventWaitStatus(event, (aclrtEventWaitStatus *)status); }

aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t *timestamp) {
    *timestamp = ((Event *)event)->microseconds;
    return *timestamp ? ACL_SUCCESS : ACL_ERROR_RT_PARAM_INVALID;
}
aclError aclrtEventElapsedTime(float *milliseconds, aclrtEvent start, aclrtEvent end) {
    uint64_t from, to;
    if (aclrtEventGetTimestamp(start, &from) || aclrtEventGetTimestamp(end, &to)) return ACL_ERROR_RT_PARAM_INVALID;
    *milliseconds = (float)((double)((int64_t)(to - from)) / 1000.0);
    return ACL_SUCCESS;
}
