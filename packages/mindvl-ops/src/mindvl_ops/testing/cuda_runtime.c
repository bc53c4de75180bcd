/* SPDX-License-Identifier: Apache-2.0 */
/* Shows one GPU to a CUDA build of torch on a machine without a GPU or a driver, for rehearsals and tests.

   Preloaded, these functions take the place of those of libcudart. They answer what torch asks before it launches a
   kernel: properties of the device, streams, events, pinned memory. Device memory is refused, and every function that is
   not defined here reaches the real libcudart, which fails without a driver: no kernel can run. The device is described by
   NAME, MEMORY_BYTES, MAJOR, MINOR and PROCESSORS; CUDA is the major version of libcudart. */

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define OUT_OF_MEMORY 2
#define STREAM (void *)0x10
#define EVENT (void *)0x20

/* The fields at the start of cudaDeviceProp; torch passes a structure of zeros. */
struct properties {
    char name[256];
    char ids[28];
    size_t memory, shared_memory;
    int registers, warp_size;
    size_t pitch;
    int threads_per_block, threads[3], blocks[3];
#if CUDA < 13
    int clock_rate;
#endif
    size_t constant_memory;
    int major, minor;
    size_t texture_alignment, texture_pitch_alignment;
#if CUDA < 13
    int overlap;
#endif
    int processors;
};

int cudaGetDeviceProperties(struct properties *found, int device) {
    strcpy(found->name, NAME);
    found->memory = MEMORY_BYTES;
    found->shared_memory = 49152;
    found->registers = 65536;
    found->warp_size = 32;
    found->threads_per_block = found->threads[0] = found->threads[1] = 1024;
    found->threads[2] = 64;
    found->blocks[0] = 2147483647;
    found->blocks[1] = found->blocks[2] = 65535;
    found->constant_memory = 65536;
    found->major = MAJOR;
    found->minor = MINOR;
    found->texture_alignment = 512;
    found->processors = PROCESSORS;
    return 0;
}

int cudaGetDeviceProperties_v2(struct properties *found, int device) { return cudaGetDeviceProperties(found, device); }

static int answer(int *place, int value) {
    *place = value;
    return 0;
}

int cudaGetDeviceCount(int *count) { return answer(count, 1); }
int cudaGetDevice(int *device) { return answer(device, 0); }
int cudaSetDevice(int device) { return 0; }
int cudaDriverGetVersion(int *version) { return answer(version, 1000 * CUDA); }
int cudaDeviceCanAccessPeer(int *can, int device, int peer) { return answer(can, 0); }
int cudaDeviceSynchronize(void) { return 0; }
int cudaGetLastError(void) { return 0; }
int cudaPeekAtLastError(void) { return 0; }

int cudaMemGetInfo(size_t *available, size_t *total) {
    *available = *total = MEMORY_BYTES;
    return 0;
}

static int handle(void **place, void *value) {
    *place = value;
    return 0;
}

int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { return answer(least, 0) + answer(greatest, -5); }
int cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) { return handle(stream, STREAM); }
int cudaStreamDestroy(void *stream) { return 0; }
int cudaStreamIsCapturing(void *stream, int *status) { return answer(status, 0); }
int cudaStreamGetCaptureInfo(void *stream, int *status) { return answer(status, 0); }
int cudaStreamGetCaptureInfo_v2(void *stream, int *status) { return answer(status, 0); }
int cudaStreamQuery(void *stream) { return 0; }
int cudaStreamSynchronize(void *stream) { return 0; }
int cudaStreamWaitEvent(void *stream, void *event, unsigned flags) { return 0; }
int cudaThreadExchangeStreamCaptureMode(int *mode) { return 0; }
int cudaEventCreateWithFlags(void **event, unsigned flags) { return handle(event, EVENT); }
int cudaEventDestroy(void *event) { return 0; }
int cudaEventElapsedTime(float *milliseconds, void *begin, void *end) { return *milliseconds = 0, 0; }
int cudaEventQuery(void *event) { return 0; }
int cudaEventRecord(void *event, void *stream) { return 0; }
int cudaEventRecordWithFlags(void *event, void *stream, unsigned flags) { return 0; }
int cudaEventSynchronize(void *event) { return 0; }

/* torch asks the driver itself whether it has a context; the stub has the name of the driver's library, too. */
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { return answer(active, 1); }

/* Pinned memory is memory of the host, which its attributes (the type comes first) do not tell from other memory. */
int cudaPointerGetAttributes(int *type, const void *place) { return answer(type, 0); }
int cudaHostAlloc(void **place, size_t size, unsigned flags) { return handle(place, malloc(size)); }
int cudaFreeHost(void *place) { return free(place), 0; }

/* There is no device memory. */
int cudaMalloc(void **place, size_t size) { return OUT_OF_MEMORY; }
