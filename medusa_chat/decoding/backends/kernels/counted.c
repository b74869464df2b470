/* A product is summed 32 inputs at a time: y = sum of scale * (scale of x) * (numbers x) + floor * (sum
   of x), so no weight is rounded, and the sums of whole numbers are exact. x is of whole numbers of 8
   bits, 32 with one scale. A panel's numbers are read into a chunk once for all rows. */

#include "counted.h"

#include <string.h>

#include "reading.h"

#if WIDTH > LANES
#define MOST_ROWS 8 /* whose sums stay in registers beside the numbers that they share */
#else
#define MOST_ROWS 4
#endif
#define MOST_FEW 6 /* rows that read a panel into registers alone */
#define MOST_SUMS (MOST_ROWS > MOST_FEW ? MOST_ROWS : MOST_FEW)
#define LARGEST 127.0f

/* 32 inputs of a row, a line of the cache: numbers, their scale, their sum times it, of all and of each
   half, and less the numbers' sums. */
typedef struct {
    int8_t numbers[STEP];
    float scale, total, totals[2];
    int32_t less, lesses[2];
    int32_t both; /* lesses, of 16 bits each */
} Line;

/* How the numbers of a step are summed: of 32 inputs at once or of 16 and 16 (halves), `run` words of
   them within 16 bits, with signs or from 0 on, times scales of their own or not, and with floors, or
   else, where they have no signs, from less than 0 on, so that the number that stands for 0, which is
   1 << shift, counts nothing. */
typedef struct {
    int run, is_signed, halves, has_scales, has_floor;
} Way;

/* How a format is summed; its numbers are up to 15, 31, 63 or 128. */
INLINE Way way_of(const Format f) {
    const int halves = f.parts == 16, is_signed = f.values || f.bits == 8;
    const int is_large = f.bits == 8 || f.values == CURVE;
    const int run = is_large ? 1 : f.bits == 6 ? 2 : f.bits == 5 || halves ? 4 : 8;
    return (Way){run, is_signed, halves, has_scales(f), f.has_floor};
}

/* The power of two that stands for 0. */
INLINE int shift_of(const Format f) {
    return __builtin_ctz((f.values || f.bits == 8 ? SIGN : f.zero) | 256u);
}

static ptrdiff_t lines_of(const Product *p) { return (ptrdiff_t)p->rows * (p->ins / STEP); }

/* Behind x: a panel's outputs [rows, PANEL]. */
static float *outputs_at(const Product *p) { return (float *)((Line *)p->x + lines_of(p)); }

size_t counted_room(const Product *p) {
    return (size_t)lines_of(p) * sizeof(Line) + (size_t)p->rows * PANEL * 4;
}

/* 32 inputs to whole numbers. What is no number makes the scale none. */
static void count_line(const float *x, Line *to) {
    typedef int8_t few __attribute__((vector_size(LANES), aligned(1), may_alias));
    vec most = all(0.0f), sizes = all(0.0f), sums[2] = {all(0.0f), all(0.0f)};
    for (int k = 0; k < STEP; k += LANES) {
        const vec size = larger(load(x + k), -load(x + k));
        most = larger(size, most);
        sizes += size;
    }
    const float high = highest(most);
    const float inverse = high > 0x1p-100f ? LARGEST / high : 0.0f;
    const float scale = high / LARGEST + (total(sizes) - total(sizes)); /* inf - inf is no number */
    for (int k = 0; k < STEP; k += LANES) {
        const vec near = nearest(load(x + k) * inverse);
        const ints whole = __builtin_convertvector(near, ints);
        *(few *)(to->numbers + k) = __builtin_convertvector(whole, few);
        sums[k / (STEP / 2)] += near;
    }
    to->scale = scale;
    for (int h = 0; h < 2; h++) {
        const float sum = total(sums[h]);
        to->totals[h] = sum * scale;
        to->lesses[h] = scale == scale ? -(int32_t)sum : 0;
    }
    to->total = total(sums[0] + sums[1]) * scale;
    to->less = to->lesses[0] + to->lesses[1];
    to->both = (int32_t)((uint32_t)to->lesses[1] << 16 | ((uint32_t)to->lesses[0] & 0xffff));
}

void round_counted(const Product *p, const float *x) {
    Line *to = (Line *)p->x;
    for (ptrdiff_t i = 0; i < lines_of(p); i++) count_line(x + i * STEP, to + i);
}

#define EACH _Pragma("GCC unroll 8") for (int r = 0; r < rows; r++)
#define OUTS _Pragma("GCC unroll 2") for (int v = 0; v < vectors; v++)

#define WORD(R, G) all_ints(((const int32_t *)x[(R) * apart].numbers)[G])

/* What stands before the sums of numbers without signs over 32 inputs, or over half h of them. */
INLINE wide_ints begun(const Line *x, int h, int shift, Way way) {
    if (way.has_floor || (way.is_signed && SIGN == 0)) return all_ints(0);
    return all_ints(h < 0 ? x->less : x->lesses[h]) << shift;
}

#if HAS_PAIRS
/* Adds to the sums of rows `count` words from `from` on, times their part's scales. */
INLINE void add_pairs(wide_ints *sums, const wide_ints *w, ptrdiff_t next, const wide_ints *scales,
                      const Line *x, ptrdiff_t apart, int from, int count, int rows, int vectors,
                      Way way) {
    const wide_ints ones = all_ints(0x00010001);
    const int run = way.run;
    _Pragma("GCC unroll 8") for (int g = from; g < from + count; g += run) {
        wide_ints pairs[2 * MOST_SUMS], ours[2][2], sizes[2];
        if (run == 2) OUTS { /* both words stay in registers for all rows */
                ours[0][v] = w[g * next + v], ours[1][v] = w[(g + 1) * next + v];
                HOLD(ours[0][v]);
                HOLD(ours[1][v]);
            }
        _Pragma("GCC unroll 8") for (int i = 0; i < run && run != 2; i++) {
            OUTS {
                ours[0][v] = w[(g + i) * next + v];
                HOLD(ours[0][v]);
                sizes[v] = way.is_signed ? sizes_of(ours[0][v]) : ours[0][v];
            }
            EACH {
                const wide_ints by = WORD(r, g + i);
                OUTS {
                    wide_ints *to = pairs + 2 * r + v;
                    const wide_ints found =
                        pairs_of(sizes[v], way.is_signed ? signed_by(by, ours[0][v]) : by);
                    *to = i ? plus_pairs(*to, found) : found;
                    if (run == 1) sums[2 * r + v] += both_of(*to, way.has_scales ? scales[v] : ones);
                    HOLD(*(run == 1 ? sums + 2 * r + v : to));
                }
            }
        }
        EACH OUTS {
            wide_ints *sum = sums + 2 * r + v, *of = pairs + 2 * r + v;
            if (run == 1) continue;
            if (run == 2)
                *of = plus_pairs(pairs_of(ours[0][v], WORD(r, g)),
                                 pairs_of(ours[1][v], WORD(r, g + 1)));
            *sum += both_of(*of, way.has_scales ? scales[v] : ones);
            HOLD(*sum);
        }
    }
}

/* The sums of rows over a step of x, its parts' times their scales. */
INLINE void sum_words(wide_ints *sums, const wide_ints *w, ptrdiff_t next, const wide_ints *scales,
                      ptrdiff_t part, const Line *x, ptrdiff_t apart, int shift, int rows, int vectors,
                      Way way) {
    typedef int16_t shorts __attribute__((vector_size(4 * WIDTH)));
    const int is_centred = way.halves && !way.has_floor, count = STEP / 4 / (1 + way.halves);
    wide_ints both[2]; /* the scales of the halves */
    if (is_centred) OUTS {
            both[v] = (scales[v] & 0xffff) | (scales[part + v] & ~0xffff);
            both[v] = (wide_ints)((shorts)both[v] << shift);
            HOLD(both[v]);
        }
    EACH {
        const Line *of = x + r * apart;
        OUTS sums[2 * r + v] =
            is_centred ? both_of(both[v], all_ints(of->both)) : begun(of, -1, shift, way);
    }
    for (int h = 0; h <= way.halves; h++)
        add_pairs(sums, w, next, scales + h * part, x, apart, h * count, count, rows, vectors, way);
}
#else
/* The sums of rows over half h of a step of x, or over all of it (h < 0): of `vectors` of outputs, whose
   words are at w, `next` vectors from one to the next. */
INLINE void sum_part(wide_ints *sums, const wide_ints *w, ptrdiff_t next, const Line *x,
                     ptrdiff_t apart, int h, int shift, int rows, int vectors, Way way) {
    const int count = h < 0 ? STEP / 4 : STEP / 8, from = h > 0 ? count : 0;
    EACH OUTS sums[2 * r + v] = begun(x + r * apart, h, shift, way);
    _Pragma("GCC unroll 8") for (int g = from; g < from + count; g++) {
        wide_ints ours[2];
        OUTS {
            ours[v] = w[g * next + v];
            HOLD(ours[v]);
        }
        EACH {
            const wide_ints by = WORD(r, g);
            OUTS {
                sums[2 * r + v] = dot(sums[2 * r + v], ours[v], by);
                HOLD(sums[2 * r + v]);
            }
        }
    }
}
#endif

/* What 32 inputs add to the outputs of rows, of `vectors` of outputs. Scales and floors of the second
   half stand `part` vectors behind the first. All but pointers are constants where it is called.

   Sums times scales of parts are whole numbers that fp32 holds, or their sum is rounded once: the same
   on every CPU. */
INLINE void add_step(wide *out, const wide_ints *w, ptrdiff_t next, const wide_ints *scales,
                     const wide *own, const wide *floors, ptrdiff_t part, const Line *x,
                     ptrdiff_t apart, int shift, int rows, int vectors, Way way) {
    wide found[2 * MOST_SUMS];
    wide_ints sums[2 * MOST_SUMS];
#if HAS_PAIRS
    sum_words(sums, w, next, scales, part, x, apart, shift, rows, vectors, way);
    EACH OUTS found[2 * r + v] = __builtin_convertvector(sums[2 * r + v], wide);
#else
    _Pragma("GCC unroll 2") for (int h = 0; h <= way.halves; h++) {
        sum_part(sums, w, next, x, apart, way.halves ? h : -1, shift, rows, vectors, way);
        EACH OUTS {
            const wide sum = __builtin_convertvector(sums[2 * r + v], wide);
            wide *to = found + 2 * r + v;
            if (!way.has_scales) *to = sum;
            else *to = h ? fused_wide(sum, (wide)scales[part + v], *to) : sum * (wide)scales[v];
        }
    }
#endif
    EACH {
        const Line *of = x + r * apart;
        OUTS out[2 * r + v] = fused_wide(found[2 * r + v] * own[v], all_wide(of->scale), out[2 * r + v]);
        for (int h = 0; way.has_floor && h <= way.halves; h++) {
            const wide sum = all_wide(way.halves ? of->totals[h] : of->total);
            OUTS out[2 * r + v] = fused_wide(sum, floors[h * part + v], out[2 * r + v]);
        }
    }
}

/* What a chunk of a panel adds to outputs y [rows, PANEL]; x: the first row's lines. */
INLINE void add_chunk(const Chunk *c, int steps, const Line *x, ptrdiff_t apart, float *y, int shift,
                      int rows, Way way) {
    const int vectors = 2;
    for (int j = 0; j < VECTORS; j += vectors) {
        wide out[2 * MOST_SUMS];
        EACH OUTS out[2 * r + v] = load_wide(y + r * PANEL + (j + v) * WIDTH);
        for (int b = 0; b < steps; b++)
            add_step(out, c->words[b][0] + j, VECTORS, c->scales[b][0] + j, c->own[b] + j,
                     c->floors[b][0] + j, VECTORS, x + b, apart, shift, rows, vectors,
                     way);
        EACH OUTS store_wide(y + r * PANEL + (j + v) * WIDTH, out[2 * r + v]);
    }
}

/* The outputs y [rows, PANEL] of a whole panel at p, whose numbers go no further than registers. */
INLINE void add_panel(const Format f, const char *p, int steps, const Line *x, ptrdiff_t apart,
                      float *y, int shift, int rows, Way way) {
    const int each = f.each / STEP, vectors = 1;
    wide out[VECTORS][2 * MOST_SUMS];
    for (int v = 0; v < VECTORS; v++) EACH out[v][2 * r] = all_wide(0.0f);
    for (int b = 0; b < steps; b += each, p += block_size(f)) {
        Own own[VECTORS];
        fetch(p, head_size(f));
        for (int v = 0; v < VECTORS; v++) own[v] = own_of(f, p, v);
        for (int s = 0; s < each; s++) {
            fetch(p + head_size(f) + s * f.bits * PANEL * 4, f.bits * PANEL * 4);
            _Pragma("GCC unroll 4") for (int v = 0; v < VECTORS; v++) {
                Numbers n;
                read_step(f, p, s, v, own[v], &n);
                add_step(out[v], n.words, 1, n.scales, &n.own, n.floors, 1,
                         x + b + s, apart, shift, rows, vectors, way);
            }
        }
    }
    for (int v = 0; v < VECTORS; v++) EACH store_wide(y + r * PANEL + v * WIDTH, out[v][2 * r]);
}

typedef void (*AddPanel)(const char *, int, const Line *, ptrdiff_t, float *);
typedef void (*AddChunk)(const Chunk *, int, const Line *, ptrdiff_t, float *);
typedef const char *(*Read)(const char *, int, Chunk *);

#define MANY 8 /* rows from which on a chunk pays: fewer read a panel into registers alone */
#define FEW(NAME, ROWS, ...)                                                                   \
    static void NAME(const char *p, int steps, const Line *x, ptrdiff_t apart, float *y) {     \
        const Format f = {__VA_ARGS__};                                                        \
        add_panel(f, p, steps, x, apart, y, shift_of(f), ROWS, way_of(f));                     \
    }
#define OWN(TYPE, ...)                                                                         \
    FEW(one_##TYPE, 1, __VA_ARGS__)                                                            \
    FEW(two_##TYPE, 2, __VA_ARGS__)                                                            \
    FEW(three_##TYPE, 3, __VA_ARGS__)                                                          \
    FEW(four_##TYPE, 4, __VA_ARGS__)                                                           \
    FEW(five_##TYPE, 5, __VA_ARGS__)                                                           \
    FEW(six_##TYPE, 6, __VA_ARGS__)                                                            \
    static void many_##TYPE(const Chunk *c, int steps, const Line *x, ptrdiff_t apart, float *y) { \
        const Format f = {__VA_ARGS__};                                                        \
        add_chunk(c, steps, x, apart, y, shift_of(f), MOST_ROWS, way_of(f));                   \
    }                                                                                          \
    static const char *read_##TYPE(const char *p, int steps, Chunk *to) {                      \
        return read_steps((Format){__VA_ARGS__}, p, steps, to);                                \
    }
ALL_FORMATS(OWN)

/* By type of ggml; panels of one row to MOST_FEW. */
#define PUT_OWN(TYPE, ...)                                                                     \
    [TYPE] = {{one_##TYPE, two_##TYPE, three_##TYPE, four_##TYPE, five_##TYPE, six_##TYPE},    \
              read_##TYPE,                                                                     \
              many_##TYPE},
static const struct {
    AddPanel few[MOST_FEW];
    Read read;
    AddChunk many;
} ways[] = {ALL_FORMATS(PUT_OWN)};

static void put_panel(const Product *p, int at) {
    const float *y = outputs_at(p);
    for (int i = 0; i < p->rows; i++)
        for (int j = 0; j < PANEL; j += LANES, y += LANES) put(p, i, at * PANEL + j, load(y));
}

/* The outputs of whole tiles of rows of a panel, chunk by chunk -> how many rows. */
static int multiply_tiles_of(const Product *p, const char *panel, Chunk *c) {
    const int steps = p->ins / STEP, end = p->rows / MOST_ROWS * MOST_ROWS;
    float *y = outputs_at(p);
    memset(y, 0, (size_t)end * PANEL * 4);
    for (int b = 0; b < steps; b += STEPS_DEEP) {
        const int deep = least(STEPS_DEEP, steps - b);
        panel = ways[p->weights.kind - PACKED].read(panel, deep, c);
        for (int row = 0; row < end; row += MOST_ROWS) {
            const Line *x = (const Line *)p->x + row * (ptrdiff_t)steps + b;
            ways[p->weights.kind - PACKED].many(c, deep, x, steps, y + row * (ptrdiff_t)PANEL);
        }
    }
    return end;
}

void multiply_counted(const Product *p, int at, int end) {
    const ptrdiff_t size = panel_size(&p->weights, p->ins);
    const char *panel = (const char *)p->weights.panels + at * size;
    const int steps = p->ins / STEP;
    Chunk c;
    for (; at < end; at++, panel += size) {
        int row = p->rows < MANY ? 0 : multiply_tiles_of(p, panel, &c);
        for (int rows; row < p->rows; row += rows) {
            rows = p->rows - row > MOST_FEW ? 4 : p->rows - row;
            const Line *x = (const Line *)p->x + row * (ptrdiff_t)steps;
            ways[p->weights.kind - PACKED].few[rows - 1](panel, steps, x, steps,
                                                         outputs_at(p) + row * (ptrdiff_t)PANEL);
        }
        put_panel(p, at);
    }
}
