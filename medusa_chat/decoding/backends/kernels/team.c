/* Between jobs the team's threads wait without sleeping for a moment, since the next step follows
   soon, and then sleep.

   Where other programs want the same cores, a thread that has its part done waits for one that is
   not running, at each of a hundred meetings: two threads then take ten times as long as one. A job
   that was mostly such waiting is followed by a while in which the caller works alone, twice as
   long each time that trying again was no better. What is computed is the same. */

#include "team.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <time.h>

#define MOST_PARTS 64
#define SPINS 4000 /* pauses: a tenth of a millisecond or more */
#define LEAST_ALONE 2000000 /* nanoseconds */
#define MOST_ALONE 250000000

#define ALONE __attribute__((aligned(128))) /* in the cache, where others do not write beside it */

static struct {
    pthread_mutex_t giving, sleeping; /* held by who gives the job; by who goes to sleep */
    pthread_cond_t bell;
    int members; /* threads there are, without the caller's */
    atomic_int sleepers;
    atomic_int_fast64_t waited; /* nanoseconds of this job, beyond the first SPINS of each wait */
    atomic_int_fast64_t alone;  /* until when the caller works alone */
    int64_t penalty;            /* nanoseconds: the last such while, 0 after a good job */
    ALONE atomic_uint turn; /* of the jobs so far, and in the low 8 bits how many parts this one has */
    Job job;
    const void *what;
    uint64_t begun; /* meetings before this job */
} team = {.giving = PTHREAD_MUTEX_INITIALIZER,
          .sleeping = PTHREAD_MUTEX_INITIALIZER,
          .bell = PTHREAD_COND_INITIALIZER};

/* At how many meetings each part has been. Its own to write; it only grows, so that who still waits
   at a meeting sees it pass. */
static struct {
    ALONE _Atomic uint64_t count;
} been[MOST_PARTS];

INLINE void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void wait_for(int part, uint64_t count) {
    for (int i = 0; atomic_load_explicit(&been[part].count, memory_order_acquire) < count; i++) {
        if (i < SPINS) {
            relax();
            continue;
        }
        const int64_t begun = now();
        while (atomic_load_explicit(&been[part].count, memory_order_acquire) < count) sched_yield();
        atomic_fetch_add(&team.waited, now() - begun);
    }
}

void meet(int part, int parts) {
    if (parts == 1) return;
    const uint64_t count = atomic_load_explicit(&been[part].count, memory_order_relaxed) + 1;
    atomic_store_explicit(&been[part].count, count, memory_order_release);
    for (int i = 0; i < parts; i++)
        if (i != part) wait_for(i, count);
}

static void *serve(void *number) {
    const int part = (int)(intptr_t)number;
    for (unsigned seen = 0;;) {
        for (int i = 0; i < 32 * SPINS && atomic_load(&team.turn) == seen; i++) relax();
        if (atomic_load(&team.turn) == seen) {
            pthread_mutex_lock(&team.sleeping);
            atomic_fetch_add(&team.sleepers, 1);
            while (atomic_load(&team.turn) == seen) pthread_cond_wait(&team.bell, &team.sleeping);
            atomic_fetch_sub(&team.sleepers, 1);
            pthread_mutex_unlock(&team.sleeping);
        }
        seen = atomic_load(&team.turn);
        const int parts = seen & 255;
        if (part >= parts) continue; /* nobody waits for it: it may be turns behind */
        atomic_store_explicit(&been[part].count, team.begun, memory_order_release);
        team.job(team.what, part, parts);
        meet(part, parts);
    }
    return NULL;
}

/* A process that forks has this thread alone. */
static void leave(void) {
    pthread_mutex_init(&team.giving, NULL);
    pthread_mutex_init(&team.sleeping, NULL);
    pthread_cond_init(&team.bell, NULL);
    team.members = 0;
    atomic_store(&team.turn, 0);
    atomic_store(&team.sleepers, 0);
    for (int i = 0; i < MOST_PARTS; i++) atomic_store(&been[i].count, 0); /* of a job half done */
    atomic_store(&team.alone, 0);
}

/* After a job that began at `begun`. */
static void reckon(int64_t begun) {
    const int64_t ended = now(), twice = 2 * team.penalty;
    if (atomic_load(&team.waited) < (ended - begun) / 3) {
        team.penalty = 0;
        return;
    }
    team.penalty = twice < LEAST_ALONE ? LEAST_ALONE : twice > MOST_ALONE ? MOST_ALONE : twice;
    atomic_store(&team.alone, ended + team.penalty);
}

void together(Job job, const void *what, int parts) {
    const int64_t begun = now();
    parts = parts > MOST_PARTS ? MOST_PARTS : parts;
    if (parts < 2 || begun < atomic_load(&team.alone) || pthread_mutex_trylock(&team.giving)) {
        job(what, 0, 1);
        return;
    }
    static int is_known;
    if (!is_known) is_known = !pthread_atfork(NULL, NULL, leave);
    while (team.members < parts - 1) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, serve, (void *)(intptr_t)(team.members + 1))) break;
        pthread_detach(thread);
        team.members++;
    }
    parts = least(parts, team.members + 1);
    team.job = job, team.what = what;
    team.begun = atomic_load_explicit(&been[0].count, memory_order_relaxed);
    atomic_store(&team.waited, 0);
    atomic_store(&team.turn, (((atomic_load(&team.turn) >> 8) + 1) << 8) | (unsigned)parts);
    if (atomic_load(&team.sleepers)) {
        pthread_mutex_lock(&team.sleeping);
        pthread_cond_broadcast(&team.bell);
        pthread_mutex_unlock(&team.sleeping);
    }
    job(what, 0, parts);
    meet(0, parts);
    reckon(begun);
    pthread_mutex_unlock(&team.giving);
}
