/* What each system has its own names for. Threads are pthreads on all of them: mingw has them, too. */

#pragma once

#include <stddef.h>
#include <stdlib.h>

#ifdef _WIN32
#include <malloc.h>

static inline void *aligned_memory(size_t bytes) { return _aligned_malloc(bytes, 64); }
static inline void free_aligned(void *memory) { _aligned_free(memory); }

/* No process of Windows forks. */
static inline int on_fork(void (*in_child)(void)) {
    (void)in_child;
    return 0;
}

#else
#include <pthread.h>

/* At a multiple of 64; NULL where there is none left. */
static inline void *aligned_memory(size_t bytes) {
    void *memory = NULL;
    return posix_memalign(&memory, 64, bytes) ? NULL : memory;
}

static inline void free_aligned(void *memory) { free(memory); }

/* Have a process that was forked call this before anything else; 0 where that works. */
static inline int on_fork(void (*in_child)(void)) { return pthread_atfork(NULL, NULL, in_child); }

#endif
