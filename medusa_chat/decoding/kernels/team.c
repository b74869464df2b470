/* Between jobs the team's threads wait without sleeping for a moment, since the next step follows
   soon, and then sleep. */

#include "team.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>

#define MOST_PARTS 64
#define SPINS 4000 /* pauses: a tenth of a millisecond or more */

static struct {
    pthread_mutex_t desk, door; /* held by who gives the job; by who goes to sleep */
    pthread_cond_t bell;
    int members; /* threads there are, without the caller's */
    Job job;
    const void *what;
    atomic_uint turn; /* of the jobs so far, and in the low 8 bits how many parts this one has */
    atomic_int arrived, phase, sleepers;
} team = {.desk = PTHREAD_MUTEX_INITIALIZER,
          .door = PTHREAD_MUTEX_INITIALIZER,
          .bell = PTHREAD_COND_INITIALIZER};

INLINE void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

void meet(int parts) {
    if (parts == 1) return;
    const int phase = atomic_load(&team.phase);
    if (atomic_fetch_add(&team.arrived, 1) == parts - 1) {
        atomic_store(&team.arrived, 0);
        atomic_store(&team.phase, phase + 1);
        return;
    }
    for (int i = 0; atomic_load(&team.phase) == phase; i++)
        i < SPINS ? relax() : (void)sched_yield();
}

static void *serve(void *number) {
    const int part = (int)(intptr_t)number;
    for (unsigned seen = 0;;) {
        for (int i = 0; i < 32 * SPINS && atomic_load(&team.turn) == seen; i++) relax();
        if (atomic_load(&team.turn) == seen) {
            pthread_mutex_lock(&team.door);
            atomic_fetch_add(&team.sleepers, 1);
            while (atomic_load(&team.turn) == seen) pthread_cond_wait(&team.bell, &team.door);
            atomic_fetch_sub(&team.sleepers, 1);
            pthread_mutex_unlock(&team.door);
        }
        seen = atomic_load(&team.turn);
        const int parts = seen & 255;
        if (part >= parts) continue; /* nobody waits for it: it may be turns behind */
        team.job(team.what, part, parts);
        meet(parts);
    }
    return NULL;
}

/* A process that forks has this thread alone. */
static void leave(void) {
    pthread_mutex_init(&team.desk, NULL);
    pthread_mutex_init(&team.door, NULL);
    pthread_cond_init(&team.bell, NULL);
    team.members = 0;
    atomic_store(&team.turn, 0);
    atomic_store(&team.arrived, 0);
    atomic_store(&team.sleepers, 0);
}

void together(Job job, const void *what, int parts) {
    parts = parts > MOST_PARTS ? MOST_PARTS : parts;
    if (parts < 2 || pthread_mutex_trylock(&team.desk)) {
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
    atomic_store(&team.turn, (((atomic_load(&team.turn) >> 8) + 1) << 8) | (unsigned)parts);
    if (atomic_load(&team.sleepers)) {
        pthread_mutex_lock(&team.door);
        pthread_cond_broadcast(&team.bell);
        pthread_mutex_unlock(&team.door);
    }
    job(what, 0, parts);
    meet(parts);
    pthread_mutex_unlock(&team.desk);
}
