/* aclnn parameter handles, which remember what they were made of. */
#define _GNU_SOURCE
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "aclnn.h"

size_t element_size(int dtype) {
    switch (dtype) {
        case ACL_INT8: case ACL_UINT8: case ACL_BOOL: return 1;
        case ACL_FLOAT16: case ACL_BF16: case ACL_INT16: case ACL_UINT16: return 2;
        case ACL_FLOAT: case ACL_INT32: case ACL_UINT32: return 4;
        case ACL_INT64: case ACL_UINT64: case ACL_DOUBLE: case ACL_COMPLEX64: return 8;
        case ACL_COMPLEX128: return 16;
        default: return 0;
    }
}

static Handle *handle(char *json) {
    Handle *made = calloc(1, sizeof *made);
    made->magic = HANDLE_MAGIC;
    made->json = json;
    return made;
}

static int destroy(const void *pointer) {
    Handle *old = (Handle *)pointer;
    if (!old || old->magic != HANDLE_MAGIC) return 0;
    for (uint64_t i = 0; old->members && i < old->count; i++) destroy(old->members[i]);
    old->magic = 0;
    free(old->members);
    free(old->values);
    free(old->json);
    free(old);
    return 0;
}

/* Text of a handle; nobody reads it while nothing is recorded. */
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
    char *a = integers(shape, dims), *b = integers(stride, dims), *c = integers(storage, storage_dims);
    Handle *made = handle(json("{\"kind\": \"tensor\", \"shape\": %s, \"stride\": %s, \"dtype\": %d, \"format\": %d, "
                               "\"offset\": %" PRId64 ", \"storage\": %s}", a, b, dtype, format, offset, c));
    free(a), free(b), free(c);
    made->dims = dims <= MAX_DIMS ? (int)dims : -1;
    made->dtype = dtype;
    made->offset = offset;
    made->data = data;
    if (dims <= MAX_DIMS) memcpy(made->shape, shape, dims * sizeof *shape), memcpy(made->stride, stride, dims * sizeof *stride);
    return made;
}

static Handle *list(const char *kind, char *values) {
    char *made = json("{\"kind\": \"%s\", \"values\": %s}", kind, values);
    free(values);
    return handle(made);
}

void *aclCreateIntArray(const int64_t *values, uint64_t count) {
    Handle *made = list("ints", integers(values, count));
    made->count = count;
    made->values = malloc((size_t)(count + 1) * sizeof *values);
    memcpy(made->values, values, (size_t)count * sizeof *values);
    return made;
}

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
    size_t size = element_size(dtype);
    if (value && size && size <= sizeof bits) memcpy(&bits, value, size);
    Handle *made = handle(json("{\"kind\": \"scalar\", \"dtype\": %d, \"bits\": %" PRId64 "}", dtype, bits));
    made->dtype = dtype;
    made->bits = bits;
    return made;
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
