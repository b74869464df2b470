/* A product is summed 32 inputs at a time: y = sum of scale * (scale of x) * (numbers x) + floor * (sum
   of x), so no weight is rounded, and the sums of whole numbers are exact. x is of whole numbers of 8
   bits, 32 with one scale. A panel's numbers are read into a chunk once for all rows. */

#include "counted.h"

#include <string.h>

#include "dot.h"
#include "packed.h"
#include "team.h"

#if WIDTH > LANES
#define MOST_ROWS 8 /* whose sums stay in registers beside the numbers that they share */
#else
#define MOST_ROWS 4
#endif
#define LARGEST 127.0f

/* Of 32 inputs of a row: the scale of its numbers, their sum times it, and less the numbers' sums: of
   all, and of the first 16. */
typedef struct {
    float scale, total;
    int32_t less, less_half;
} Counted;

static size_t whole_lines(size_t bytes) { return (bytes + 63) / 64 * 64; }

static size_t counted_bytes(const Product *p) {
    return whole_lines((size_t)p->rows * (size_t)(p->ins / STEP) * sizeof(Counted));
}

/* Behind x: what belongs to its steps, and a panel's outputs [rows, PANEL]. */
static Counted *counted_at(const Product *p) {
    return (Counted *)((char *)p->x + whole_lines((size_t)p->rows * (size_t)p->ins));
}
static float *outputs_at(const Product *p) {
    return (float *)((char *)counted_at(p) + counted_bytes(p));
}

size_t counted_room(const Product *p) {
    return 64 + counted_bytes(p) + (size_t)p->rows * PANEL * 4;
}

/* 32 inputs to whole numbers. What is no number makes the scale none. */
static Counted count_step(const float *x, int8_t *to) {
    typedef int8_t few __attribute__((vector_size(LANES), aligned(1), may_alias));
    vec most = all(0.0f), sizes = all(0.0f), sums[2] = {all(0.0f), all(0.0f)};
    for (int k = 0; k < STEP; k += LANES) {
        const vec size = larger(load(x + k), -load(x + k));
        most = larger(size, most);
        sizes += size;
    }
    const float high = highest(most);
    const float inverse = high > 0x1p-100f ? LARGEST / high : 0.0f;
    for (int k = 0; k < STEP; k += LANES) {
        const vec near = nearest(load(x + k) * inverse);
        *(few *)(to + k) = __builtin_convertvector(__builtin_convertvector(near, ints), few);
        sums[k / (STEP / 2)] += near;
    }
    const float scale = high / LARGEST + (total(sizes) - total(sizes)); /* inf - inf is no number */
    const float first = total(sums[0]), whole = first + total(sums[1]);
    if (scale != scale) return (Counted){scale, scale, 0, 0};
    return (Counted){scale, whole * scale, -(int32_t)whole, -(int32_t)first};
}

void round_counted(const Product *p, const float *x) {
    const int count = p->rows * (p->ins / STEP);
    Counted *counted = counted_at(p);
    int8_t *to = (int8_t *)p->x;
    for (int b = 0; b < count; b++, x += STEP, to += STEP) counted[b] = count_step(x, to);
}

/* How the numbers of a step are summed: of 32 inputs at once or of 16 and 16, `run` words of them
   within 16 bits (0: of 8 bits, with signs), and with floors, or else from less than 0 on, so
   that the number that stands for 0, which is 1 << shift, counts nothing. */
typedef struct {
    int run, halves, has_floor;
} Way;

#define EACH _Pragma("GCC unroll 8") for (int r = 0; r < rows; r++)
#define BOTH _Pragma("GCC unroll 2") for (int v = 0; v < 2; v++)

/* `count` words from w on. */
INLINE void add_words(wide_ints *sums, wide_ints (*w)[VECTORS], const int32_t *x, ptrdiff_t stride,
                      int count, int run, int rows) {
#if defined(PAIRED_DOT)
    const int step = run ? run : 1;
    _Pragma("GCC unroll 8") for (int g = 0; g < count; g += step) {
        wide_ints pairs[2 * MOST_ROWS];
        _Pragma("GCC unroll 8") for (int i = 0; i < step; i++) {
            wide_ints low = w[g + i][0], high = w[g + i][1];
            HOLD(low);
            HOLD(high);
            const wide_ints sizes[2] = {run ? low : size_of(low), run ? high : size_of(high)};
            EACH {
                const wide_ints ours = all_ints(x[r * stride + g + i]);
                BOTH {
                    const wide_ints by = run ? ours : with_sign(ours, v ? high : low);
                    const wide_ints found = pairs_of(sizes[v], by);
                    pairs[2 * r + v] = i ? plus_pairs(pairs[2 * r + v], found) : found;
                    HOLD(pairs[2 * r + v]);
                }
            }
        }
        EACH BOTH sums[2 * r + v] = plus_both(sums[2 * r + v], pairs[2 * r + v]);
    }
#else
    (void)run;
    _Pragma("GCC unroll 8") for (int g = 0; g < count; g++) {
        wide_ints low = w[g][0], high = w[g][1];
        HOLD(low);
        HOLD(high);
        EACH {
            const wide_ints ours = all_ints(x[r * stride + g]);
            sums[2 * r] = dot(sums[2 * r], low, ours);
            sums[2 * r + 1] = dot(sums[2 * r + 1], high, ours);
            HOLD(sums[2 * r]);
            HOLD(sums[2 * r + 1]);
        }
    }
#endif
}

/* What a chunk of a panel adds to outputs y [rows, PANEL]. x and counted: of the first row's inputs.
   way and rows are constants where it is called. */
INLINE void add_chunk(const Chunk *c, int steps, const int32_t *x, ptrdiff_t stride,
                      const Counted *counted, ptrdiff_t apart, float *y, int shift, int rows, Way way) {
    const int half = STEP / 4 / 2, count = way.halves ? half : 2 * half;
    for (int j = 0; j < VECTORS; j += 2) {
        wide out[2 * MOST_ROWS];
        EACH BOTH out[2 * r + v] = load_wide(y + r * PANEL + (j + v) * WIDTH);
        for (int b = 0; b < steps; b++) {
            const Counted *of = counted + b;
            const int32_t *at = x + b * (STEP / 4);
            wide parts[2 * MOST_ROWS];
            _Pragma("GCC unroll 2") for (int h = 0; h <= way.halves; h++) {
                wide_ints sums[2 * MOST_ROWS];
                EACH {
                    const Counted *o = of + r * apart;
                    const int less = h ? o->less - o->less_half : way.halves ? o->less_half : o->less;
                    const int is_even = way.has_floor || (way.run == 0 && SIGN == 0);
                    const wide_ints begun = is_even ? all_ints(0) : all_ints(less) << shift;
                    BOTH sums[2 * r + v] = begun;
                }
                wide_ints(*w)[VECTORS] = (wide_ints(*)[VECTORS])(c->words[b][h * half] + j);
                add_words(sums, w, at + h * half, stride, count, way.run, rows);
                const wide *scales = c->scales[way.halves ? 2 * b + h : b] + j;
                EACH BOTH {
                    const wide found = __builtin_convertvector(sums[2 * r + v], wide);
                    wide *part = parts + 2 * r + v;
                    *part = h ? fused_wide(found, scales[v], *part) : found * scales[v];
                }
            }
            EACH {
                const Counted *o = of + r * apart;
                BOTH out[2 * r + v] = fused_wide(parts[2 * r + v], all_wide(o->scale), out[2 * r + v]);
                if (!way.has_floor) continue;
                const wide *floors = c->floors[way.halves ? 2 * b : b] + j;
                const float first = way.halves ? o->scale * (float)-o->less_half : o->total;
                BOTH out[2 * r + v] = fused_wide(all_wide(first), floors[v], out[2 * r + v]);
                if (!way.halves) continue;
                const float next = o->scale * (float)(o->less_half - o->less);
                BOTH out[2 * r + v] =
                    fused_wide(all_wide(next), floors[VECTORS + v], out[2 * r + v]);
            }
        }
        EACH BOTH store_wide(y + r * PANEL + (j + v) * WIDTH, out[2 * r + v]);
    }
}

#define ADD(NAME, ROWS, ...)                                                                       \
    static void NAME##_##ROWS(const Chunk *c, int steps, const int32_t *x, ptrdiff_t stride,        \
                              const Counted *counted, ptrdiff_t apart, float *y, int shift) {       \
        add_chunk(c, steps, x, stride, counted, apart, y, shift, ROWS, (Way){__VA_ARGS__});         \
    }
#if MOST_ROWS == 8
#define ADDS(NAME, ...)        \
    ADD(NAME, 1, __VA_ARGS__)  \
    ADD(NAME, 2, __VA_ARGS__)  \
    ADD(NAME, 4, __VA_ARGS__)  \
    ADD(NAME, 8, __VA_ARGS__)
#define OF(NAME) {NAME##_1, NAME##_2, NAME##_4, NAME##_8}
#else
#define ADDS(NAME, ...)        \
    ADD(NAME, 1, __VA_ARGS__)  \
    ADD(NAME, 2, __VA_ARGS__)  \
    ADD(NAME, 4, __VA_ARGS__)
#define OF(NAME) {NAME##_1, NAME##_2, NAME##_4}
#endif
ADDS(small_floored, 8, 0, 1)  /* numbers up to 15 */
ADDS(small_centred, 8, 0, 0)
ADDS(five_floored, 4, 0, 1)   /* up to 31 */
ADDS(five_centred, 4, 0, 0)
ADDS(halves_floored, 4, 1, 1) /* up to 15 */
ADDS(halves_centred, 2, 1, 0) /* up to 63 */
ADDS(signed_whole, 0, 0, 0)

typedef void (*Add)(const Chunk *, int, const int32_t *, ptrdiff_t, const Counted *, ptrdiff_t,
                    float *, int);
static const Add adds[][4] = {OF(small_floored), OF(small_centred), OF(five_floored), OF(five_centred),
                              OF(halves_floored), OF(halves_centred), OF(signed_whole)};

static const Add *adds_of(const Format *f) {
    if (f->values || f->bits == 8) return adds[6];
    if (f->parts == 16) return adds[f->has_floor ? 4 : 5];
    return adds[(f->bits == 5 ? 2 : 0) + !f->has_floor];
}

static void put_panel(const Product *p, int at) {
    const float *y = outputs_at(p);
    for (int i = 0; i < p->rows; i++)
        for (int j = 0; j < PANEL; j += LANES, y += LANES) put(p, i, at * PANEL + j, load(y));
}

void multiply_counted(const Product *p, int at, int end) {
    const Format *f = format_of(p->weights.kind);
    const Add *add = adds_of(f);
    const int zero = f->values || f->bits == 8 ? SIGN : f->zero, steps = p->ins / STEP;
    const int shift = __builtin_ctz((unsigned)zero | 256u); /* zero is a power of two, or 0 */
    Chunk c;
    const char *panel = (const char *)p->weights.panels + at * panel_size(&p->weights, p->ins);
    for (; at < end; at++) {
        memset(outputs_at(p), 0, (size_t)p->rows * PANEL * 4);
        for (int b = 0; b < steps; b += STEPS_DEEP) {
            const int deep = least(STEPS_DEEP, steps - b);
            panel = read_chunk(p->weights.kind, panel, deep, &c);
            for (int row = 0, size; row < p->rows; row += size) {
                int place = MOST_ROWS == 8 ? 3 : 2;
                while (1 << place > p->rows - row) place--;
                size = 1 << place;
                add[place](&c, deep, (const int32_t *)p->x + row * (ptrdiff_t)p->stride + b * (STEP / 4),
                           p->stride, counted_at(p) + row * (ptrdiff_t)steps + b, steps,
                           outputs_at(p) + row * (ptrdiff_t)PANEL, shift);
            }
        }
        put_panel(p, at);
    }
}
