/* SPDX-License-Identifier: Apache-2.0 */
/* Lets the wheel be imported beside a CUDA build of torch, for contract tests and rehearsals alone.

   Both register a key of the same name with PyTorch's allocator configuration, and the second to do so ends the process.
   Preloaded, this gives every registration a set of its own. The struct is an empty std::unordered_set<std::string> of
   libstdc++; KEYS is the mangled name of c10::CachingAllocator::AcceleratorAllocatorConfig::getMutableKeys. */

#include <stdlib.h>

struct set {
    void **buckets;
    size_t bucket_count;
    void *first;
    size_t size;
    float max_load_factor;
    size_t next_resize;
    void *single_bucket;
};

struct set *keys(void) __asm__(KEYS);

struct set *keys(void) {
    struct set *empty = calloc(1, sizeof *empty);
    empty->buckets = &empty->single_bucket;
    empty->bucket_count = 1;
    empty->max_load_factor = 1.0f;
    return empty;
}
