/* A product is summed block by block: y = sum of scale * (numbers x) + floor * (sum of x), so no
   weight is rounded. x is of whole numbers of 16 bits, a block's with one scale, and a block's sum is
   one of whole numbers, which are read out of the panel into registers and nowhere else. */

#include "packed.h"

#include "team.h"

#if WIDTH > LANES
#define MOST_ROWS 8 /* whose sums stay in registers beside the numbers that they share */
#else
#define MOST_ROWS 4
#endif

static size_t whole_lines(size_t bytes) { return (bytes + 63) / 64 * 64; }

/* Bytes of a number for each row and block. */
static size_t table_size(const Product *p) {
    return whole_lines((size_t)p->rows * (size_t)(p->ins / p->weights.block) * 4);
}

/* Behind x: the sums of x over each block, the scales of its whole numbers, and a panel's outputs
   [rows, PANEL]. */
static float *totals_at(const Product *p) {
    return (float *)((char *)p->x + whole_lines((size_t)p->rows * (size_t)p->ins * 2));
}
static float *scales_at(const Product *p) { return totals_at(p) + table_size(p) / 4; }
static float *outputs_at(const Product *p) { return scales_at(p) + table_size(p) / 4; }

size_t packed_room(const Product *p) {
    return 64 + 2 * table_size(p) + (size_t)p->rows * PANEL * 4;
}

/* A block of x to whole numbers of 16 bits; their scale, and their sum times it. What is no number
   makes the scale none. */
static float count_block(const float *x, uint16_t *to, int block, float *scale) {
    vec most = all(0.0f), sizes = all(0.0f), sum = all(0.0f);
    for (int k = 0; k < block; k += LANES) {
        const vec size = larger(load(x + k), -load(x + k));
        most = larger(size, most);
        sizes += size;
    }
    const float high = highest(most);
    *scale = high / 32767.0f + (total(sizes) - total(sizes)); /* inf - inf is no number */
    const float inverse = high > 0x1p-100f ? 32767.0f / high : 0.0f;
    for (int k = 0; k < block; k += LANES) {
        const vec near = nearest(load(x + k) * inverse);
        *(halves *)(to + k) = __builtin_convertvector(__builtin_convertvector(near, ints), halves);
        sum += near;
    }
    return total(sum) * *scale;
}

void round_packed(const Product *p, const float *x) {
    const int block = p->weights.block, count = p->rows * (p->ins / block);
    float *totals = totals_at(p), *scales = scales_at(p);
    uint16_t *to = (uint16_t *)p->x;
    for (int b = 0; b < count; b++, x += block, to += block)
        totals[b] = count_block(x, to, block, scales + b);
}

typedef uint16_t numbers __attribute__((vector_size(4 * WIDTH)));

INLINE numbers numbers_at(const char *p) {
    typedef uint16_t some __attribute__((vector_size(4 * WIDTH), aligned(2), may_alias));
    return *(const some *)p;
}

/* Whole numbers of 8 bits as ones of 16. */
INLINE numbers widened(const char *p) {
    typedef int8_t some __attribute__((vector_size(2 * WIDTH), aligned(1), may_alias));
#if defined(__AVX2__)
    numbers found; /* what GCC 12 makes of the other way takes four times as many */
    __asm__("vpmovsxbw %1, %0" : "=v"(found) : "m"(*(const some *)p));
    return found;
#else
    return __builtin_convertvector(*(const some *)p, numbers);
#endif
}

/* Lane by lane a[0] * b[0] + a[1] * b[1] + sums of two whole numbers of 16 bits each. */
INLINE wide_ints counted(wide_ints a, wide_ints b, wide_ints sums) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    __asm__("vpdpwssd %2, %1, %0" : "+v"(sums) : "v"(a), "v"(b));
    return sums;
#elif defined(__AVXVNNI__)
    __asm__("%{vex%} vpdpwssd %2, %1, %0" : "+x"(sums) : "x"(a), "x"(b));
    return sums;
#elif defined(__AVX2__)
    wide_ints both;
    __asm__("vpmaddwd %2, %1, %0" : "=v"(both) : "v"(a), "v"(b));
    return sums + both;
#else
    return sums + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

#define EACH _Pragma("GCC unroll 8") for (int r = 0; r < rows; r++)

/* What rows add for a pair of inputs x, whose numbers are `low` and `high` of 2 * WIDTH outputs.
   HOLD keeps GCC from adding later, for which it has no registers. */
INLINE void count(wide_ints *sums, const int32_t *x, ptrdiff_t stride, numbers low, numbers high,
                  int rows) {
    EACH {
        const wide_ints ours = (wide_ints){0} + x[r * stride];
        sums[2 * r] = counted(ours, (wide_ints)low, sums[2 * r]);
        sums[2 * r + 1] = counted(ours, (wide_ints)high, sums[2 * r + 1]);
        HOLD(sums[2 * r]);
        HOLD(sums[2 * r + 1]);
    }
}

/* The sums of rows over a block of x, whose numbers of 2 * WIDTH outputs are at p. */
INLINE void count_all(wide_ints *sums, const int32_t *x, ptrdiff_t stride, const char *p, int half,
                      int rows, int kind) {
    for (int k = 0; k < half; k += kind == NIBBLES ? IN_A_WORD : 1) {
        if (kind == NIBBLES) {
            fetch(p, 2 * BOTH);
            numbers a = numbers_at(p), b = numbers_at(p + sizeof a);
            HOLD(a);
            HOLD(b);
            count(sums, x + k, stride, a & 15, b & 15, rows);
            count(sums, x + k + 1, stride, a >> 4 & 15, b >> 4 & 15, rows);
            count(sums, x + k + 2, stride, a >> 8 & 15, b >> 8 & 15, rows);
            count(sums, x + k + 3, stride, a >> 12, b >> 12, rows);
            p += 2 * BOTH;
        } else {
            fetch(p, BOTH);
            count(sums, x + k, stride, widened(p), widened(p + sizeof(numbers) / 2), rows);
            p += BOTH;
        }
    }
}

/* A panel's outputs y of some rows from `row` on. rows and kind are constants where it is called. */
INLINE void sum(const Product *p, const char *panel, int row, float *y, int rows, int kind) {
    const Weights w = p->weights;
    const int half = w.block / 2, blocks = p->ins / w.block;
    const ptrdiff_t table = table_bytes(&w), tables = table * (1 + w.has_floor);
    const ptrdiff_t stride = p->stride, size = tables + numbers_size(&w);
    for (int j = 0; j < PANEL; j += 2 * WIDTH) {
        const char *numbers = panel + tables + j * (kind == NIBBLES ? 4 : 2), *scales = panel;
        const int32_t *x = (const int32_t *)p->x + row * stride;
        const float *parts = scales_at(p) + row * blocks, *whole = totals_at(p) + row * blocks;
        wide out[2 * MOST_ROWS];
        EACH out[2 * r] = out[2 * r + 1] = all_wide(0.0f);
        for (int b = 0; b < blocks; b++, x += half, parts++, whole++) {
            wide_ints sums[2 * MOST_ROWS];
            EACH sums[2 * r] = sums[2 * r + 1] = (wide_ints){0};
            count_all(sums, x, stride, numbers, half, rows, kind);
            _Pragma("GCC unroll 2") for (int v = 0; v < 2; v++) {
                const wide scale = floats_at(&w, scales, j + v * WIDTH);
                EACH {
                    const wide found = __builtin_convertvector(sums[2 * r + v], wide);
                    wide *to = out + 2 * r + v;
                    *to = fused_wide(found * parts[r * blocks], scale, *to);
                }
                if (!w.has_floor) continue;
                const wide floor = floats_at(&w, scales + table, j + v * WIDTH);
                EACH {
                    wide *to = out + 2 * r + v;
                    *to = fused_wide(all_wide(whole[r * blocks]), floor, *to);
                }
            }
            scales += size, numbers += size;
        }
        EACH for (int v = 0; v < 2; v++)
            *(loose_wide *)(y + r * PANEL + j + v * WIDTH) = out[2 * r + v];
    }
}

#define SUM(ROWS)                                                                         \
    static void nibbles_##ROWS(const Product *p, const char *panel, int row, float *y) {  \
        sum(p, panel, row, y, ROWS, NIBBLES);                                             \
    }                                                                                     \
    static void bytes_##ROWS(const Product *p, const char *panel, int row, float *y) {    \
        sum(p, panel, row, y, ROWS, BYTES);                                               \
    }
SUM(1)
SUM(2)
SUM(3)
SUM(4)
#if MOST_ROWS == 8
SUM(5)
SUM(6)
SUM(7)
SUM(8)
#define LAST_ROWS(KIND) , KIND##_5, KIND##_6, KIND##_7, KIND##_8
#else
#define LAST_ROWS(KIND)
#endif

static void (*const sum_rows[][MOST_ROWS])(const Product *, const char *, int, float *) = {
    {nibbles_1, nibbles_2, nibbles_3, nibbles_4 LAST_ROWS(nibbles)},
    {bytes_1, bytes_2, bytes_3, bytes_4 LAST_ROWS(bytes)}};

static void put_panel(const Product *p, int at) {
    const float *y = outputs_at(p);
    for (int i = 0; i < p->rows; i++)
        for (int j = 0; j < PANEL; j += LANES, y += LANES) put(p, i, at * PANEL + j, load(y));
}

void multiply_packed(const Product *p, int at, int end) {
    const ptrdiff_t size = panel_size(&p->weights, p->ins);
    const char *panel = (const char *)p->weights.panels + at * size;
    float *y = outputs_at(p);
    const int tiles = (p->rows + MOST_ROWS - 1) / MOST_ROWS, kind = p->weights.kind == BYTES;
    for (; at < end; at++, panel += size) {
        for (int t = 0; t < tiles; t++) {
            const int row = first(p->rows, t, tiles), rows = first(p->rows, t + 1, tiles) - row;
            sum_rows[kind][rows - 1](p, panel, row, y + (ptrdiff_t)row * PANEL);
        }
        put_panel(p, at);
    }
}
