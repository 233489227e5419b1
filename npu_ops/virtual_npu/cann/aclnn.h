/* What aclnn parameter handles remember, for the recorder and for the few calls that are computed here. */
#pragma once
#include "runtime.h"

#define HANDLE_MAGIC UINT64_C(0x76697274756e7075)
#define MAX_DIMS 16

typedef struct Handle {
    uint64_t magic;
    char *json;
    struct Handle **members;  /* of a list, which owns them */
    uint64_t count;           /* of members, or of values */
    int64_t *values;          /* of an array of integers */
    int64_t bits;             /* of a scalar */
    int dims, dtype;          /* of a tensor, as are the rest */
    int64_t shape[MAX_DIMS], stride[MAX_DIMS], offset;
    char *data;
} Handle;

extern int recording;

/* Bytes of one element, or 0 for a type that is not known. */
size_t element_size(int dtype);

/* Compute a call that torch_npu makes past PyTorch's dispatcher. Returns 0 if that was done, or -1 for a call not known. */
int compute_call(const char *name, const long *arguments);
