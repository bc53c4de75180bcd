/* SPDX-License-Identifier: Apache-2.0 */
/* Stands in for the CANN runtime libraries, so that the real torch_npu can be imported on a machine without an NPU.

   Compiled with -DDEVICES=0 every call fails; with -DDEVICES=1 there is one device that accepts what import and
   FakeTensorMode ask and refuses memory and kernels. All other symbols come from NAMES, which build.py writes from what
   `nm` finds in the wheel: EACH(name) a line. */

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#define REFUSED 507000
#define ANSWER (DEVICES ? 0 : REFUSED)

int aclrtGetDeviceCount(uint32_t *count) {
    *count = DEVICES;
    return ANSWER;
}

int aclrtGetDevice(int32_t *device) {
    *device = 0;
    return ANSWER;
}

static int handle(void **place) {
    if (DEVICES)
        *place = malloc(64);
    return ANSWER;
}

int aclrtCreateStream(void **stream) { return handle(stream); }
int aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flag) { return handle(stream); }
int aclrtCreateEventExWithFlag(void **event, uint32_t flag) { return handle(event); }
int aclrtGetCurrentContext(void **context) { return handle(context); }

int aclrtGetMemInfo(int attribute, size_t *available, size_t *total) {
    *available = *total = (size_t)1 << 36;
    return ANSWER;
}

size_t aclGetCompileoptSize(int option) { return 16; }
int aclGetCompileopt(int option, char *value, size_t size) {
    *value = 0;
    return ANSWER;
}

const char *aclrtGetSocName(void) { return DEVICES ? "Ascend910B3" : NULL; }
const char *aclGetRecentErrMsg(void) { return "no CANN: stub runtime without an NPU"; }

/* Pinned memory is memory of the host. */
int aclrtMallocHost(void **place, size_t size) {
    if (DEVICES)
        *place = malloc(size);
    return ANSWER;
}

int aclrtFreeHost(void *place) {
    free(place);
    return ANSWER;
}

/* There is no device memory and no kernel, with or without a device. */
int aclrtMalloc(void **place, size_t size, int policy) { return REFUSED; }
int aclrtMemcpy(void *to, size_t room, const void *from, size_t size, int kind) { return REFUSED; }
int aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t size, int kind, void *stream) { return REFUSED; }
int aclopCompileAndExecute(void) { return REFUSED; }
int rtKernelLaunch(void) { return REFUSED; }

void *aclCreateDataBuffer(void *data, size_t size) { return malloc(64); }
void *aclCreateTensorDesc(int type, int rank, const int64_t *shape, int format) { return malloc(64); }
void *aclopCreateAttr(void) { return malloc(64); }

#define EACH(name) \
    int name(void) { return ANSWER; }
#include NAMES
