/* Lanes are outputs and sums go along the inputs, so that no sum depends on the rows beside it.

   A lane of a panel is four bytes: a float, or two of bf16 one behind the other. Only what multiplies
   them differs. */

#include "product.h"

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#include "counted.h"
#include "dot.h"
#include "half.h"
#include "system.h"
#include "team.h"
#include "tiles.h"
#include "vectors.h"

#define NOINLINE __attribute__((noinline))

/* Sums go on by the k-th words of a panel's lanes: x[k] floats, or two of bf16 in place of one, or
   2k and 2k + 1 of floats. */
INLINE wide by_floats(const float *x, int k, wide w, wide sum) {
    return fused_wide(all_wide(x[k]), w, sum);
}
INLINE wide by_halves(const float *x, int k, wide w, wide sum) {
    return paired_wide(all_wide(x[k]), w, sum);
}
INLINE wide by_uppers(const float *x, int k, wide w, wide sum) {
    sum = fused_wide(all_wide(x[2 * k]), (wide)((wide_ints)w << 16), sum);
    return fused_wide(all_wide(x[2 * k + 1]), (wide)((wide_ints)w & ~0xffff), sum);
}

/* ROWS rows times COUNT vectors of outputs, from panel `at` on, which lies at w. Panels lie one behind
   the other as they are read, so that the processor foresees it: asking for them as well would be in
   its way. Two rows take the outputs one by one: both halves of all of them find no registers. */
#define TILE(NAME, MULTIPLY, ROWS, COUNT)                                                      \
    INLINE void NAME(const Product *p, const float *w, int row, int at) {                      \
        const int ins = p->ins;                                                                \
        const ptrdiff_t panel = (ptrdiff_t)ins * PANEL;                                        \
        const ptrdiff_t stride = p->stride;                                                    \
        const float *x = (const float *)p->x + row * stride;                                   \
        wide sums[ROWS * COUNT] = {0};                                                         \
        for (int k = 0; k < ins; k++, w += PANEL) {                                            \
            wide ours[COUNT];                                                                  \
            _Pragma("GCC unroll 8") for (int j = 0; j < COUNT; j++)                            \
                ours[j] = load_wide(w + j / VECTORS * panel + j % VECTORS * WIDTH);            \
            _Pragma("GCC unroll 8") for (int j = 0; ROWS > 1 && j < COUNT; j++) HOLD(ours[j]); \
            _Pragma("GCC unroll 32") for (int t = 0; t < ROWS * COUNT; t++) {                  \
                const int i = ROWS > 2 ? t / COUNT : t % ROWS;                                 \
                const int j = ROWS > 2 ? t % COUNT : t / ROWS;                                 \
                wide *sum = sums + i * COUNT + j;                                              \
                *sum = MULTIPLY(x + i * stride, k, ours[j], *sum);                             \
            }                                                                                  \
        }                                                                                      \
        _Pragma("GCC unroll 8") for (int i = 0; i < ROWS; i++)                                 \
            _Pragma("GCC unroll 8") for (int j = 0; j < COUNT; j++)                            \
                put_wide(p, row + i, at * PANEL + j * WIDTH, sums[i * COUNT + j]);             \
    }

/* The panels from `at` to `end` of ROWS rows: as many at once as there are registers for. */
#define SWEEP(MULTIPLY, ROWS, PANELS)                                                       \
    TILE(MULTIPLY##_many_##ROWS, MULTIPLY, ROWS, (PANELS * VECTORS))                        \
    TILE(MULTIPLY##_one_##ROWS, MULTIPLY, ROWS, VECTORS)                                    \
    static NOINLINE void MULTIPLY##_##ROWS(const Product *p, const float *w, int row, int at, \
                                           int end) {                                       \
        const ptrdiff_t panel = (ptrdiff_t)p->ins * PANEL;                                  \
        for (; at + PANELS <= end; at += PANELS, w += PANELS * panel)                       \
            MULTIPLY##_many_##ROWS(p, w, row, at);                                          \
        for (; at < end; at++, w += panel) MULTIPLY##_one_##ROWS(p, w, row, at);            \
    }

#define LONE (VECTORS == 4 ? 2 : 3) /* panels at once of a row alone */
#define SWEEPS(MULTIPLY)     \
    SWEEP(MULTIPLY, 1, LONE) \
    SWEEP(MULTIPLY, 2, 2)    \
    SWEEP(MULTIPLY, 3, 1)    \
    SWEEP(MULTIPLY, 4, 1)    \
    SWEEP(MULTIPLY, 5, 1)
SWEEPS(by_floats)
SWEEP(by_floats, 6, 1)
SWEEPS(by_halves)
SWEEP(by_halves, 6, 1)
SWEEPS(by_uppers)

#define NEAR 6 /* panels that stay in a near cache until all rows had them */

/* By kind of weights; of UPPERS both halves of a word stand in registers, too. */
#if WIDTH > LANES
SWEEP(by_halves, 7, 1)
SWEEP(by_halves, 8, 1)
#define LAST_HALVES , by_halves_7, by_halves_8
#define MOST_ROWS 8 /* of a sweep */
#else
#define LAST_HALVES
#define MOST_ROWS 6
#endif
static const int most_rows[] = {6, MOST_ROWS, 5};
static void (*const sweeps[][MOST_ROWS])(const Product *, const float *, int, int, int) = {
    {by_floats_1, by_floats_2, by_floats_3, by_floats_4, by_floats_5, by_floats_6},
    {by_halves_1, by_halves_2, by_halves_3, by_halves_4, by_halves_5, by_halves_6 LAST_HALVES},
    {by_uppers_1, by_uppers_2, by_uppers_3, by_uppers_4, by_uppers_5},
};

/* Memory of a thread's own, kept until it ends. */
static pthread_key_t room_key;
static pthread_once_t has_key = PTHREAD_ONCE_INIT;
static __thread size_t room_size;

static void make_key(void) {
    if (pthread_key_create(&room_key, free_aligned)) abort();
}

static void *room(size_t bytes) {
    pthread_once(&has_key, make_key);
    void *mine = pthread_getspecific(room_key);
    if (room_size >= bytes) return mine;
    free_aligned(mine);
    mine = aligned_memory(bytes);
    if (!mine || pthread_setspecific(room_key, mine)) abort();
    room_size = bytes;
    return mine;
}

Product ready(const Product *p) {
    Product q = *p;
    q.stride = p->ins;
    if (takes_floats(&p->weights)) return q;
    if (is_packed(&p->weights)) {
        q.x = room(counted_room(p));
        round_counted(&q, p->x);
        return q;
    }
    const int ins = (p->ins + 1) / 2 * 2;
    uint16_t *x = room((size_t)p->rows * (size_t)ins * 2);
    q.x = x, q.stride = ins / 2;
    for (int i = 0; i < p->rows; i++, x += ins) {
        const float *from = (const float *)p->x + (ptrdiff_t)i * p->ins;
        narrow_all(from, x, p->ins);
        if (ins > p->ins) x[p->ins] = 0;
    }
    return q;
}

/* The panels from `at` to `end` of every row: as few sweeps as there can be, of about as many rows
   each. */
static void sweep(const Product *p, int at, int end) {
    const int kind = (int)p->weights.kind, most = most_rows[kind], tiles = (p->rows + most - 1) / most;
    const char *w = (const char *)p->weights.panels + at * panel_size(&p->weights, p->ins);
    Product q = *p;
    if (kind != FLOATS) q.ins = (p->ins + 1) / 2;
    for (int t = 0; t < tiles; t++) {
        const int row = first(p->rows, t, tiles), rows = first(p->rows, t + 1, tiles) - row;
        sweeps[kind][rows - 1](&q, (const float *)w, row, at, end);
    }
}

void multiply(const Product *p, int at, int end) {
    if (is_packed(&p->weights)) {
        multiply_counted(p, at, end);
        return;
    }
    for (int stop; at < end; at = stop) {
        stop = is_tiled(p) && p->rows <= MOST_TILED ? end : least(at + NEAR, end);
        if (is_tiled(p)) multiply_tiles(p, at, stop);
        else sweep(p, at, stop);
    }
}

/* Whether q, which is ready, has the x that p needs. */
static int has_x(const Product *q, const Product *from, const Product *p) {
    const int is_like = is_packed(&p->weights) == is_packed(&q->weights) &&
                        takes_floats(&p->weights) == takes_floats(&q->weights);
    return is_like && from->x == p->x && from->rows == p->rows && from->ins == p->ins;
}

void multiply_alike(const Product *all, int count, int at, int end) {
    if (at >= end) return;
    Product q = ready(all);
    for (int i = 0; i < count; i++) {
        Product p = all[i];
        if (has_x(&q, all, &p)) p.x = q.x, p.stride = q.stride;
        else p = ready(&p);
        q = p;
        multiply(&q, at, end);
    }
}

void share_all(const Product *all, int count, int part, int parts) {
    int panels = 0;
    for (int i = 0; i < count; i++) panels += panels_of(all + i);
    const int begun = first(panels, part, parts), stop = first(panels, part + 1, parts);
    const Product *last = NULL;
    Product q = *all;
    for (int i = 0, base = 0; i < count; base += panels_of(all + i), i++) {
        const int at = begun > base ? begun - base : 0, end = least(stop - base, panels_of(all + i));
        if (at >= end) continue;
        Product p = all[i];
        if (last && has_x(&q, last, &p)) p.x = q.x, p.stride = q.stride;
        else p = ready(&p);
        last = all + i, q = p;
        multiply(&q, at, end);
    }
}

/* Outputs of a panel. */
EXPORT int64_t panel(void) { return PANEL; }

/* The instructions, written by hand here, that products take: 0 of vectors, 1 of tiles of bf16, 2 of
   packed weights. */
EXPORT const char *instructions(int64_t kind) {
    return kind == 0 ? VECTORS_BY : kind == 2 ? DOT_BY : HAS_TILES ? "AMX" : PORTABLE;
}

/* Those that gave wrong products on this machine, so that this library does without. */
#define SPELT(...) #__VA_ARGS__
#define NAMED(...) SPELT(__VA_ARGS__)
#ifndef WITHOUT
#define WITHOUT
#endif
EXPORT const char *without(void) { return NAMED(WITHOUT); }

static void multiply_part(const void *what, int part, int parts) { share(what, part, parts); }

/* One linear alone. */
EXPORT void linear(const Product *p, int64_t threads) {
    together(multiply_part, p, (int)threads);
}
