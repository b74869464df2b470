/* Between jobs the team's threads wait without sleeping for a moment, since the next step follows
   soon, and then sleep.

   Where other programs want the same cores, threads that have their parts done wait for one that is
   not running, at each of a hundred meetings: two threads then take ten times as long as one. A job
   that lost more by such waiting than its last thread can save is followed by a while with a thread
   less, twice as long each time that trying again was no better. What is computed is the same. */

#include "team.h"
#include "system.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <time.h>

#define MOST_PARTS 64
#define SPINS 4000 /* pauses: a tenth of a millisecond or more */
#define LEAST_PAUSE 2000000 /* nanoseconds */
#define MOST_PAUSE 250000000

#define ALONE __attribute__((aligned(128))) /* in the cache, where others do not write beside it */

static struct {
    pthread_mutex_t giving, sleeping; /* held by who gives the job; by who goes to sleep */
    int members;                /* threads there are, without the caller's */
    atomic_int_fast64_t waited; /* nanoseconds of this job, beyond the first SPINS of each wait */
    atomic_int limit;           /* threads of a job until `again`, when one more is tried */
    int64_t again, pause;       /* nanoseconds: when that is, and how long such a while lasts */
    ALONE atomic_uint turn; /* of the jobs so far, and in the low 8 bits how many parts this one has */
    Job job;
    const void *what;
    uint64_t begun; /* meetings before this job */
} team = {.giving = PTHREAD_MUTEX_INITIALIZER,
          .sleeping = PTHREAD_MUTEX_INITIALIZER,
          .limit = MOST_PARTS - 1};

/* At how many meetings each part has been. Its own to write; it only grows, so that who still waits
   at a meeting sees it pass. */
static struct {
    ALONE _Atomic uint64_t count;
} been[MOST_PARTS];

/* What wakes each part's thread, and whether it sleeps. */
static pthread_cond_t bells[MOST_PARTS] = {[0 ... MOST_PARTS - 1] = PTHREAD_COND_INITIALIZER};
static atomic_int sleeps[MOST_PARTS];

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

/* Until there is another job than `seen`. Who would have no part in it sleeps at once. */
static unsigned next_turn(int part, unsigned seen) {
    for (int i = 0; i < 32 * SPINS && part < atomic_load(&team.limit); i++) {
        if (atomic_load(&team.turn) != seen) break;
        relax();
    }
    if (atomic_load(&team.turn) == seen) {
        pthread_mutex_lock(&team.sleeping);
        atomic_store(&sleeps[part], 1);
        while (atomic_load(&team.turn) == seen) pthread_cond_wait(&bells[part], &team.sleeping);
        atomic_store(&sleeps[part], 0);
        pthread_mutex_unlock(&team.sleeping);
    }
    return atomic_load(&team.turn);
}

static void *serve(void *number) {
    const int part = (int)(intptr_t)number;
    for (unsigned seen = 0;;) {
        seen = next_turn(part, seen);
        const int parts = seen & 255;
        if (part >= parts) continue; /* nobody waits for it: it may be turns behind */
        atomic_store_explicit(&been[part].count, team.begun, memory_order_release);
        team.job(team.what, part, parts);
        meet(part, parts);
    }
    return NULL;
}

static void wake(int parts) {
    for (int i = 1; i < parts; i++) {
        if (!atomic_load(&sleeps[i])) continue;
        pthread_mutex_lock(&team.sleeping);
        pthread_cond_signal(&bells[i]);
        pthread_mutex_unlock(&team.sleeping);
    }
}

/* A process that forks has this thread alone. */
static void leave(void) {
    pthread_mutex_init(&team.giving, NULL);
    pthread_mutex_init(&team.sleeping, NULL);
    team.members = 0;
    atomic_store(&team.turn, 0);
    for (int i = 0; i < MOST_PARTS; i++) {
        atomic_store(&been[i].count, 0); /* of a job half done */
        atomic_store(&sleeps[i], 0);
        pthread_cond_init(&bells[i], NULL);
    }
    team.limit = MOST_PARTS - 1;
}

/* After a job of `parts` threads. Where all but one of them waited for a `parts`-th of its time, one
   thread less would have been as fast. */
static void reckon(int asked, int parts, int64_t begun, int64_t ended) {
    const int64_t took = ended - begun, twice = 2 * team.pause;
    if (3 * parts * atomic_load(&team.waited) < 2 * (parts - 1) * took) {
        if (team.limit < parts) {
            team.limit = parts;
            team.again = ended + team.pause;
        }
        if (parts == asked) team.pause = took < team.pause ? team.pause - took : 0;
        return;
    }
    team.limit = parts - 1;
    team.pause = twice < LEAST_PAUSE ? LEAST_PAUSE : twice > MOST_PAUSE ? MOST_PAUSE : twice;
    team.again = ended + team.pause;
}

static void lead(Job job, const void *what, int asked, int parts) {
    const int64_t begun = now();
    team.job = job, team.what = what;
    team.begun = atomic_load_explicit(&been[0].count, memory_order_relaxed);
    atomic_store(&team.waited, 0);
    atomic_store(&team.turn, (((atomic_load(&team.turn) >> 8) + 1) << 8) | (unsigned)parts);
    wake(parts);
    job(what, 0, parts);
    meet(0, parts);
    reckon(asked, parts, begun, now());
}

/* How many threads a job has that asks for `parts`. */
static int members_for(int parts) {
    static int is_known;
    if (!is_known) is_known = !on_fork(leave);
    parts = least(parts, now() < team.again ? team.limit : team.limit + 1);
    while (team.members < parts - 1) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, serve, (void *)(intptr_t)(team.members + 1))) break;
        pthread_detach(thread);
        team.members++;
    }
    return least(parts, team.members + 1);
}

void together(Job job, const void *what, int parts) {
    if (parts < 2 || pthread_mutex_trylock(&team.giving)) {
        job(what, 0, 1);
        return;
    }
    const int members = members_for(parts);
    if (members > 1) lead(job, what, parts, members);
    else job(what, 0, 1);
    pthread_mutex_unlock(&team.giving);
}
