/* Operator calls that torch_npu's C++ makes past PyTorch's dispatcher, computed on the tensors' memory. */
#include <string.h>

#include "aclnn.h"

static int is_tensor(const Handle *handle) {
    return handle && handle->magic == HANDLE_MAGIC && handle->data && handle->dims >= 0 && element_size(handle->dtype);
}

static char *element(const Handle *tensor, const int64_t *index) {
    int64_t place = tensor->offset;
    for (int i = 0; i < tensor->dims; i++) place += index[i] * tensor->stride[i];
    return tensor->data + place * (int64_t)element_size(tensor->dtype);
}

/* Next index of a shape, last dim fastest; 0 when all are done. */
static int next(const Handle *tensor, int64_t *index) {
    for (int i = tensor->dims - 1; i >= 0; i--) {
        if (++index[i] < tensor->shape[i]) return 1;
        index[i] = 0;
    }
    return 0;
}

static int64_t elements(const Handle *tensor) {
    int64_t count = 1;
    for (int i = 0; i < tensor->dims; i++) count *= tensor->shape[i];
    return count;
}

/* aclnnConstantPadNd(self, pad, value, out): pads in PyTorch's order, last dim first. A value other than 0 is left to others:
 * it would have to be converted to the tensor's type. */
static int constant_pad(const Handle *from, const Handle *pad, const Handle *value, const Handle *to) {
    if (!is_tensor(from) || !is_tensor(to) || from->dims != to->dims || from->dtype != to->dtype || value->bits) return -1;
    int64_t before[MAX_DIMS] = {0}, index[MAX_DIMS] = {0}, inside[MAX_DIMS];
    for (uint64_t i = 0; i < pad->count / 2; i++) before[from->dims - 1 - (int)i] = pad->values[2 * i];
    size_t size = element_size(to->dtype);
    if (!elements(to)) return 0;
    do {
        int within = 1;
        for (int i = 0; i < to->dims; i++) {
            inside[i] = index[i] - before[i];
            within &= inside[i] >= 0 && inside[i] < from->shape[i];
        }
        if (within) memcpy(element(to, index), element(from, inside), size);
        else memset(element(to, index), 0, size);
    } while (next(to, index));
    return 0;
}

int compute_call(const char *name, const long *arguments) {
    const Handle *const *handles = (const Handle *const *)arguments;
    if (!strcmp(name, "aclnnConstantPadNdGetWorkspaceSize")) return constant_pad(handles[0], handles[1], handles[2], handles[3]);
    return -1;
}
