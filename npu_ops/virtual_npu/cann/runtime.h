/* What the files of the stand-in CANN runtime share. Prototypes come from the headers that torch_npu ships. */
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "acl/acl.h"

#define MAX_DEVICES 64

typedef struct {
    int active;       /* somebody has made it current */
    size_t used;      /* bytes of device memory in use by this process */
} Device;

typedef struct {
    int devices;
    size_t memory;    /* bytes of one device */
    char soc[64];
    char cann[64];
    int cube_cores;
    int vector_cores;
} Settings;

extern Settings settings;
extern Device devices[MAX_DEVICES];

/* The calling thread's device, or -1: like CANN, a thread has none until it picks one. */
int current_device(void);
