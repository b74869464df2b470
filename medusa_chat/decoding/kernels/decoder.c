/* A few rows through a decoder in fp32 on a CPU: products, norms, rotary attention, gated SiLU.

   Every number is summed in one order, whatever rows stand beside it: products along their inputs
   in eight lanes, attention along the text. A row of a tree therefore has the bits that it has
   alone, and a tree decodes to plain decoding's tokens, bit for bit. Weights are read where torch
   holds them. Plain C with vectors of GCC and Clang; no library but libm. */

#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#define NOINLINE __attribute__((noinline))
#define LANES 8
#define BLOCK 16 /* rows of attention that go together: two vectors */
#define MOST_HIDDEN 16384

typedef float vec __attribute__((vector_size(32)));
typedef float loose __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(32)));

INLINE vec load(const float *p) { return *(const loose *)p; }
INLINE void store(float *p, vec v) { *(loose *)p = v; }
INLINE vec all(float x) { return (vec){x, x, x, x, x, x, x, x}; }
INLINE int least(int a, int b) { return a < b ? a : b; }

/* a * b + c, rounded once where the CPU can: never left to the compiler, which would choose anew
   in each place. */
INLINE vec fused(vec a, vec b, vec c) {
#if defined(__AVX2__) && defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    typedef union {
        vec whole;
        float32x4_t half[2];
    } Halves;
    Halves x = {a}, y = {b}, z = {c};
    z.half[0] = vfmaq_f32(z.half[0], x.half[0], y.half[0]);
    z.half[1] = vfmaq_f32(z.half[1], x.half[1], y.half[1]);
    return z.whole;
#else
    return a * b + c;
#endif
}

/* Holds a vector in a register, where GCC would read it from memory again for every use. */
#if defined(__AVX2__)
#define HOLD(v) __asm__("" : "+x"(v))
#else
#define HOLD(v) (void)0
#endif

INLINE vec pick(ints mask, vec yes, vec no) {
    return (vec)((mask & (ints)yes) | (~mask & (ints)no));
}

/* The lanes' sum, in one order. */
INLINE float total(vec v) {
    return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
}

/* e^x to 2 units in the last place; 0 under -87 (as for -inf), so that what is masked adds nothing. */
INLINE vec exponential(vec x) {
    const vec high = all(88.0f), low = all(-87.0f), magic = all(12582912.0f);
    ints vanishes = x < low;
    vec y = pick(x > high, high, pick(vanishes, low, x));
    vec n = (y * 1.44269504f + magic) - magic;
    vec r = y - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = all(1.9875691500e-4f);
    p = fused(p, r, all(1.3981999507e-3f));
    p = fused(p, r, all(8.3334519073e-3f));
    p = fused(p, r, all(4.1665795894e-2f));
    p = fused(p, r, all(1.6666665459e-1f));
    p = fused(p, r, all(5.0000001201e-1f));
    p = fused(p * r, r, r) + 1.0f;
    ints power = (__builtin_convertvector(n, ints) + 127) << 23;
    return pick(vanishes, all(0.0f), p * (vec)power);
}

/* y [rows, outs] = x [rows, ins] w^T (+ bias) (+ y). w is packed: panels of eight outputs, each
   [ins, 8]; what is beyond the last output is 0. */
typedef struct {
    const float *x, *w, *bias;
    float *y;
    int rows, ins, outs, adds;
} Product;

/* Eight sums to where they go; the last ones may be fewer. */
INLINE void put(const Product *p, int row, int out, vec sums) {
    float *y = p->y + (ptrdiff_t)row * p->outs + out;
    if (out + LANES <= p->outs) {
        if (p->bias) sums += load(p->bias + out);
        store(y, p->adds ? load(y) + sums : sums);
        return;
    }
    for (int j = 0; out + j < p->outs; j++) {
        float sum = sums[j];
        if (p->bias) sum += p->bias[out + j];
        y[j] = p->adds ? y[j] + sum : sum;
    }
}

/* ROWS rows times PANELS panels, from panel `at` on: lanes are outputs, sums go along the inputs. */
#define TILE(ROWS, PANELS)                                                                      \
    INLINE void tile_##ROWS##_##PANELS(const Product *p, int row, int at) {                     \
        const int ins = p->ins;                                                                 \
        const ptrdiff_t panel = (ptrdiff_t)ins * LANES;                                         \
        const float *x = p->x + (ptrdiff_t)row * ins, *w = p->w + at * panel;                   \
        vec sums[ROWS * PANELS] = {0};                                                          \
        for (int k = 0; k < ins; k++) {                                                         \
            vec ours[PANELS];                                                                   \
            _Pragma("GCC unroll 8") for (int j = 0; j < PANELS; j++)                            \
                ours[j] = load(w + j * panel + (ptrdiff_t)k * LANES);                           \
            _Pragma("GCC unroll 8") for (int j = 0; ROWS > 1 && j < PANELS; j++) HOLD(ours[j]); \
            _Pragma("GCC unroll 8") for (int i = 0; i < ROWS; i++) {                            \
                vec theirs = all(x[(ptrdiff_t)i * ins + k]);                                    \
                _Pragma("GCC unroll 8") for (int j = 0; j < PANELS; j++)                        \
                    sums[i * PANELS + j] = fused(theirs, ours[j], sums[i * PANELS + j]);        \
            }                                                                                   \
        }                                                                                       \
        _Pragma("GCC unroll 8") for (int i = 0; i < ROWS; i++)                                  \
            _Pragma("GCC unroll 8") for (int j = 0; j < PANELS; j++)                            \
                put(p, row + i, (at + j) * LANES, sums[i * PANELS + j]);                        \
    }

/* The panels from `at` to `end` of ROWS rows. */
#define SWEEP(ROWS, PANELS)                                                              \
    TILE(ROWS, PANELS)                                                                   \
    TILE(ROWS, 1)                                                                        \
    static NOINLINE void sweep_##ROWS(const Product *p, int row, int at, int end) {               \
        for (; at + PANELS <= end; at += PANELS) tile_##ROWS##_##PANELS(p, row, at);     \
        for (; at < end; at++) tile_##ROWS##_1(p, row, at);                              \
    }

SWEEP(1, 8)
SWEEP(2, 6)
SWEEP(3, 4)
SWEEP(4, 3)

/* The panels from `at` to `end`, three at a time for all rows but the last few, which find them in
   a near cache. */
static NOINLINE void multiply(const Product *p, int at, int end) {
    const int whole = p->rows - p->rows % 4;
    while (at < end) {
        const int begin = at, stop = least(at + 24, end);
        for (; at < stop; at = least(at + 3, stop))
            for (int row = 0; row < whole; row += 4) sweep_4(p, row, at, least(at + 3, stop));
        if (p->rows % 4 == 1) sweep_1(p, whole, begin, stop);
        if (p->rows % 4 == 2) sweep_2(p, whole, begin, stop);
        if (p->rows % 4 == 3) sweep_3(p, whole, begin, stop);
    }
}

/* w [outs, ins], row by row, to panels [ceil(outs / 8), ins, 8]. */
EXPORT void pack(const float *w, float *panels, int64_t outs, int64_t ins) {
    for (int64_t at = 0; at < outs; at += LANES)
        for (int64_t k = 0; k < ins; k++)
            for (int64_t j = 0; j < LANES; j++)
                *panels++ = at + j < outs ? w[(at + j) * ins + k] : 0.0f;
}

/* The team: threads that do one job together, each its part of every piece of it. Between jobs
   they wait without sleeping for a moment, since the next step follows soon, and then sleep. */

#define MOST_PARTS 64
#define SPINS 4000 /* pauses: a tenth of a millisecond or more */

typedef void (*Job)(const void *what, int part, int parts);

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

/* Nobody goes on before all are here. */
static void meet(int parts) {
    if (parts == 1) return;
    const int phase = atomic_load(&team.phase);
    if (atomic_fetch_add(&team.arrived, 1) == parts - 1) {
        atomic_store(&team.arrived, 0);
        atomic_store(&team.phase, phase + 1);
        return;
    }
    for (int i = 0; atomic_load(&team.phase) == phase; i++) i < SPINS ? relax() : (void)sched_yield();
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

/* Do a job with `parts` threads, fewer where no more can be had; alone where the team has one. */
static void together(Job job, const void *what, int parts) {
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

/* What one layer reads; keys and values [kv_heads, capacity, head_dim]. */
typedef struct {
    const float *before, *qkv, *qkv_bias, *out, *out_bias;
    const float *after, *gate_up, *gate_up_bias, *down, *down_bias;
    float *keys, *values;
} Layer;

/* What all layers share; cosines and sines [capacity, head_dim]. */
typedef struct {
    int64_t count, hidden, heads, kv_heads, head_dim, inner, capacity, vocabulary;
    float epsilon, scaling;
    const float *embedding, *norm, *cosines, *sines;
    const Layer *layers;
} Decoder;

/* One pass: rows behind `start` tokens of the text; mask [rows, start + rows], `stride` a row. */
typedef struct {
    const Decoder *decoder;
    const int64_t *tokens, *positions;
    const float *mask;
    int64_t stride, rows, start, threads;
    float *hidden; /* [rows, hidden], out */
    float *work;
} Pass;

static void normalise(const float *x, const float *w, float *y, int size, float epsilon) {
    vec squares = all(0.0f);
    float rest = 0.0f;
    int k = 0;
    for (; k + LANES <= size; k += LANES) squares = fused(load(x + k), load(x + k), squares);
    for (int t = k; t < size; t++) rest += x[t] * x[t];
    float scale = 1.0f / sqrtf((total(squares) + rest) / (float)size + epsilon);
    for (k = 0; k + LANES <= size; k += LANES) store(y + k, load(x + k) * scale * load(w + k));
    for (; k < size; k++) y[k] = x[k] * scale * w[k];
}

static void normalise_all(const Pass *pass, const float *x, const float *w, float *y) {
    const int size = (int)pass->decoder->hidden;
    for (int i = 0; i < pass->rows; i++)
        normalise(x + (ptrdiff_t)i * size, w, y + (ptrdiff_t)i * size, size, pass->decoder->epsilon);
}

static void rotate(const float *x, const float *cosines, const float *sines, float *y, int size) {
    const int half = size / 2;
    for (int d = 0; d < half; d++) {
        float a = x[d], b = x[d + half];
        y[d] = a * cosines[d] - b * sines[d];
        y[d + half] = b * cosines[d + half] + a * sines[d + half];
    }
}

/* The rows' queries turned where they stand; their keys and values put behind the text. */
static void place(const Pass *pass, const Layer *layer, float *qkv, int row, int end) {
    const Decoder *m = pass->decoder;
    const int size = (int)m->head_dim, heads = (int)m->heads, kv = (int)m->kv_heads;
    float turned[512];
    for (int i = row; i < end; i++) {
        const float *cosines = m->cosines + pass->positions[i] * size;
        const float *sines = m->sines + pass->positions[i] * size;
        float *from = qkv + (ptrdiff_t)i * (heads + 2 * kv) * size;
        for (int h = 0; h < heads; h++) {
            rotate(from + h * size, cosines, sines, turned, size);
            memcpy(from + h * size, turned, sizeof(float) * size);
        }
        for (int h = 0; h < kv; h++) {
            const ptrdiff_t at = (h * m->capacity + pass->start + i) * size;
            rotate(from + (heads + h) * size, cosines, sines, layer->keys + at, size);
            memcpy(layer->values + at, from + (heads + kv + h) * size, sizeof(float) * size);
        }
    }
}

/* How many of the first columns hide nothing from any row. */
static int free_columns(const Pass *pass) {
    int free = (int)(pass->start + pass->rows);
    for (int i = 0; i < pass->rows; i++) {
        const float *row = pass->mask + i * pass->stride;
        int j = 0;
        while (j < free && row[j] == 0.0f) j++;
        free = j;
    }
    return free;
}

/* Scores [keys, BLOCK] of queries [head_dim, BLOCK]: lanes are rows, a sum goes along head_dim. */
#define SCORE(KEYS, VECTORS)                                                                     \
    INLINE void score_##KEYS##_##VECTORS(const float *q, const float *k, float *s, int size) {   \
        vec sums[KEYS * VECTORS] = {0};                                                          \
        for (int d = 0; d < size; d++)                                                           \
            _Pragma("GCC unroll 8") for (int v = 0; v < VECTORS; v++) {                          \
                vec ours = load(q + d * BLOCK + v * LANES);                                      \
                _Pragma("GCC unroll 8") for (int j = 0; j < KEYS; j++)                           \
                    sums[j * VECTORS + v] =                                                    \
                        fused(ours, all(k[(ptrdiff_t)j * size + d]), sums[j * VECTORS + v]);     \
            }                                                                                    \
        _Pragma("GCC unroll 8") for (int j = 0; j < KEYS; j++)                                   \
            _Pragma("GCC unroll 8") for (int v = 0; v < VECTORS; v++)                            \
                store(s + j * BLOCK + v * LANES, sums[j * VECTORS + v]);                         \
    }

SCORE(1, 1)
SCORE(8, 1)
SCORE(1, 2)
SCORE(6, 2)

/* Values of DIMS dimensions, mixed by shares [keys, BLOCK]: a sum goes along the text. */
#define MIX(DIMS, VECTORS)                                                                        \
    INLINE void mix_##DIMS##_##VECTORS(const float *s, const float *values, int keys, int size,   \
                                       float *out) {                                              \
        vec sums[DIMS * VECTORS] = {0};                                                           \
        for (int j = 0; j < keys; j++)                                                            \
            _Pragma("GCC unroll 8") for (int v = 0; v < VECTORS; v++) {                           \
                vec share = load(s + (ptrdiff_t)j * BLOCK + v * LANES);                           \
                _Pragma("GCC unroll 8") for (int d = 0; d < DIMS; d++)                            \
                    sums[d * VECTORS + v] =                                                     \
                        fused(share, all(values[(ptrdiff_t)j * size + d]), sums[d * VECTORS + v]); \
            }                                                                                     \
        _Pragma("GCC unroll 8") for (int d = 0; d < DIMS; d++)                                    \
            _Pragma("GCC unroll 8") for (int v = 0; v < VECTORS; v++)                             \
                store(out + d * BLOCK + v * LANES, sums[d * VECTORS + v]);                        \
    }

MIX(1, 1)
MIX(8, 1)
MIX(1, 2)
MIX(4, 2)

/* Attention of BLOCK (row, head) pairs that share a key head, from pair `first` on. */
static void attend(const Pass *pass, const Layer *layer, const float *qkv, int kv, int start,
                   int free, float *scratch, float *mixed) {
    const Decoder *m = pass->decoder;
    const int size = (int)m->head_dim, heads = (int)m->heads, groups = heads / (int)m->kv_heads;
    const int width = (heads + 2 * (int)m->kv_heads) * size, keys = (int)(pass->start + pass->rows);
    const int pairs = least(BLOCK, (int)pass->rows * groups - start), wide = pairs > LANES;
    const float *k = layer->keys + kv * m->capacity * size;
    const float *v = layer->values + kv * m->capacity * size;
    float *q = scratch, *out = q + size * BLOCK, *s = out + size * BLOCK;
    int row[BLOCK], head[BLOCK];
    for (int l = 0; l < BLOCK; l++) {
        const int pair = start + least(l, pairs - 1);
        row[l] = pair / groups;
        head[l] = kv * groups + pair % groups;
        const float *from = qkv + (ptrdiff_t)row[l] * width + head[l] * size;
        for (int d = 0; d < size; d++) q[d * BLOCK + l] = from[d] * m->scaling;
    }
    int j = 0;
    if (wide) {
        for (; j + 6 <= keys; j += 6) score_6_2(q, k + (ptrdiff_t)j * size, s + j * BLOCK, size);
        for (; j < keys; j++) score_1_2(q, k + (ptrdiff_t)j * size, s + j * BLOCK, size);
    } else {
        for (; j + 8 <= keys; j += 8) score_8_1(q, k + (ptrdiff_t)j * size, s + j * BLOCK, size);
        for (; j < keys; j++) score_1_1(q, k + (ptrdiff_t)j * size, s + j * BLOCK, size);
    }
    for (j = free; j < keys; j++)
        for (int l = 0; l < BLOCK; l++) s[j * BLOCK + l] += pass->mask[row[l] * pass->stride + j];
    for (int part = 0; part < (wide ? BLOCK : LANES); part += LANES) {
        vec most = load(s + part), sum = all(0.0f);
        for (j = 1; j < keys; j++) {
            vec x = load(s + j * BLOCK + part);
            most = pick(x > most, x, most);
        }
        for (j = 0; j < keys; j++) {
            vec share = exponential(load(s + j * BLOCK + part) - most);
            sum += share;
            store(s + j * BLOCK + part, share);
        }
        store(q + part, 1.0f / sum); /* the queries are done with */
    }
    int d = 0;
    if (wide) {
        for (; d + 4 <= size; d += 4) mix_4_2(s, v + d, keys, size, out + d * BLOCK);
        for (; d < size; d++) mix_1_2(s, v + d, keys, size, out + d * BLOCK);
    } else {
        for (; d + 8 <= size; d += 8) mix_8_1(s, v + d, keys, size, out + d * BLOCK);
        for (; d < size; d++) mix_1_1(s, v + d, keys, size, out + d * BLOCK);
    }
    for (int l = 0; l < pairs; l++) {
        float *to = mixed + ((ptrdiff_t)row[l] * heads + head[l]) * size;
        for (d = 0; d < size; d++) to[d] = out[d * BLOCK + l] * q[l];
    }
}

/* Columns `at` to `end` of gate_up [rows, 2 * inner] -> silu(gate) * up [rows, inner]. */
static void activate(const float *gate_up, float *y, int rows, int inner, int at, int end) {
    for (int i = 0; i < rows; i++) {
        const float *gate = gate_up + (ptrdiff_t)i * 2 * inner, *up = gate + inner;
        for (int k = at; k < end; k += LANES) {
            vec g = load(gate + k);
            store(y + (ptrdiff_t)i * inner + k, g / (1.0f + exponential(-g)) * load(up + k));
        }
    }
}

/* What of `count` things is one part's: from first(...) of this part to first(...) of the next. */
INLINE int first(int count, int part, int parts) { return (int)((int64_t)count * part / parts); }

/* One part of a product, from panel `base` on. */
static void share(const Product *p, int base, int panels, int part, int parts) {
    multiply(p, base + first(panels, part, parts), base + first(panels, part + 1, parts));
}

/* Floats that a pass of `rows` rows over `keys` tokens works in. */
EXPORT int64_t work_size(const Decoder *m, int64_t rows, int64_t keys, int64_t threads) {
    const int64_t width = (m->heads + 2 * m->kv_heads) * m->head_dim;
    const int64_t shared = rows * (width + m->heads * m->head_dim + 3 * m->inner);
    return shared + threads * (rows * m->hidden + (2 * m->head_dim + keys) * BLOCK);
}

static void decode(const void *what, int part, int parts) {
    const Pass *pass = what;
    const Decoder *m = pass->decoder;
    const int rows = (int)pass->rows, size = (int)m->hidden, inner = (int)m->inner;
    const int width = (int)((m->heads + 2 * m->kv_heads) * m->head_dim);
    const int mixes = (int)(m->heads * m->head_dim), groups = (int)(m->heads / m->kv_heads);
    const int blocks = (rows * groups + BLOCK - 1) / BLOCK, free = free_columns(pass);
    const int tasks = (int)m->kv_heads * blocks, row = first(rows, part, parts);
    const int row_end = first(rows, part + 1, parts), keys = (int)pass->start + rows;
    float *x = pass->hidden, *qkv = pass->work, *mixed = qkv + (ptrdiff_t)rows * width;
    float *gate_up = mixed + (ptrdiff_t)rows * mixes;
    float *active = gate_up + (ptrdiff_t)rows * 2 * inner;
    float *normed = active + (ptrdiff_t)rows * inner; /* a part's own from here on */
    normed += part * ((ptrdiff_t)rows * size + (2 * m->head_dim + keys) * BLOCK);
    float *scratch = normed + (ptrdiff_t)rows * size;
    for (int i = row; i < row_end; i++)
        memcpy(x + (ptrdiff_t)i * size, m->embedding + pass->tokens[i] * size, sizeof(float) * size);
    meet(parts);
    for (int l = 0; l < m->count; l++) {
        const Layer *layer = m->layers + l;
        const Product heads = {normed, layer->qkv, layer->qkv_bias, qkv, rows, size, width, 0};
        const Product out = {mixed, layer->out, layer->out_bias, x, rows, mixes, size, 1};
        const Product wide = {normed,  layer->gate_up, layer->gate_up_bias, gate_up, rows, size,
                              2 * inner, 0};
        const Product down = {active, layer->down, layer->down_bias, x, rows, inner, size, 1};
        normalise_all(pass, x, layer->before, normed);
        share(&heads, 0, width / LANES, part, parts);
        meet(parts);
        place(pass, layer, qkv, row, row_end);
        meet(parts);
        for (int t = first(tasks, part, parts); t < first(tasks, part + 1, parts); t++)
            attend(pass, layer, qkv, t / blocks, t % blocks * BLOCK, free, scratch, mixed);
        meet(parts);
        share(&out, 0, size / LANES, part, parts);
        meet(parts);
        normalise_all(pass, x, layer->after, normed);
        share(&wide, 0, inner / LANES, part, parts);
        share(&wide, inner / LANES, inner / LANES, part, parts);
        activate(gate_up, active, rows, inner, LANES * first(inner / LANES, part, parts),
                 LANES * first(inner / LANES, part + 1, parts));
        meet(parts);
        share(&down, 0, size / LANES, part, parts);
        meet(parts);
    }
    if (part == 0) normalise_all(pass, x, m->norm, x);
}

/* 0, or 1 where a row lies outside of the embeddings or of the cache: nothing is done then. */
EXPORT int64_t run(const Pass *pass) {
    const Decoder *m = pass->decoder;
    if (pass->start < 0 || pass->start + pass->rows > m->capacity) return 1;
    for (int64_t i = 0; i < pass->rows; i++) {
        if (pass->tokens[i] < 0 || pass->tokens[i] >= m->vocabulary) return 1;
        if (pass->positions[i] < 0 || pass->positions[i] >= m->capacity) return 1;
    }
    together(decode, pass, (int)pass->threads);
    return 0;
}

static void multiply_part(const void *what, int part, int parts) {
    const Product *p = what;
    share(p, 0, (p->outs + LANES - 1) / LANES, part, parts);
}

/* One linear alone: x [rows, ins] -> y [rows, outs]. */
EXPORT void linear(const float *x, const float *w, const float *bias, float *y, int64_t rows,
                   int64_t ins, int64_t outs, int64_t threads) {
    const Product p = {x, w, bias, y, (int)rows, (int)ins, (int)outs, 0};
    together(multiply_part, &p, (int)threads);
}

/* A draft from one position: heads of residual layers, x + silu(W x + b), layer after layer; the LM
   head they share; of each head's logits the `width` largest, which fill a tree. */
typedef struct {
    const float *panels, *bias;       /* [layers, heads, hidden / 8, hidden, 8], [layers, heads, hidden] */
    const float *lm_panels, *lm_bias; /* NULL: only the states are wanted */
    const float *hidden;              /* [hidden] */
    float *states, *logits;           /* [used, hidden], [used, size] */
    float *values, *sums;             /* [used, width], [used]: log(sum(exp)) of all logits */
    int64_t *places;                  /* [used, width] */
    const int64_t *index;             /* [nodes]: 0 the root, else 1 + a place among the guesses */
    int64_t *tokens;                  /* [nodes] */
    float *shares;                    /* [nodes]: the heads' probabilities, NaN for the root */
    int64_t layers, heads, used, hidden_size, size, width, nodes, root, threads;
} Proposal;

/* log(sum(exp(x / temperature))), and with it the entropy of that distribution in nats. */
static float log_sum(const float *x, int size, float temperature, float *entropy) {
    vec most = all(-INFINITY), sum = all(0.0f), mean = all(0.0f);
    float high = -INFINITY;
    int j = 0;
    for (; j + LANES <= size; j += LANES) most = pick(load(x + j) > most, load(x + j), most);
    for (int l = 0; l < LANES; l++) high = most[l] > high ? most[l] : high;
    for (; j < size; j++) high = x[j] > high ? x[j] : high;
    const float scale = 1.0f / temperature;
    for (j = 0; j < size; j += LANES) {
        vec y = all(-INFINITY);
        if (j + LANES <= size) y = load(x + j);
        else
            for (int l = 0; j + l < size; l++) y[l] = x[j + l];
        y = (y - high) * scale;
        const vec share = exponential(y);
        sum += share;
        mean = fused(share, pick(y > all(-1000.0f), y, all(0.0f)), mean);
    }
    const float whole = total(sum), log_whole = logf(whole);
    if (entropy) *entropy = log_whole - total(mean) / whole;
    return high * scale + log_whole;
}

static void residual(const Proposal *h, int k) {
    const int size = (int)h->hidden_size;
    float wide[MOST_HIDDEN], *x = h->states + (ptrdiff_t)k * size;
    memcpy(x, h->hidden, sizeof(float) * size);
    for (int l = 0; l < h->layers; l++) {
        const ptrdiff_t at = l * h->heads + k;
        const Product p = {x,    h->panels + at * size * size, h->bias + at * size, wide, 1,
                           size, size,                         0};
        multiply(&p, 0, size / LANES);
        for (int d = 0; d < size; d += LANES) {
            vec y = load(wide + d);
            store(x + d, load(x + d) + y / (1.0f + exponential(-y)));
        }
    }
}

/* The `count` largest of a row in falling order, the first of equals first, and their places. */
static void find_best(const float *x, int size, int count, float *values, int64_t *places) {
    int known = 0;
    for (int j = 0; j < size; j++) {
        if (known == count && !(x[j] > values[count - 1])) continue;
        int at = known < count ? known++ : count - 1;
        for (; at > 0 && x[j] > values[at - 1]; at--)
            values[at] = values[at - 1], places[at] = places[at - 1];
        values[at] = x[j], places[at] = j;
    }
}

static void propose_part(const void *what, int part, int parts) {
    const Proposal *h = what;
    const int size = (int)h->size, width = (int)h->width;
    for (int k = part; h->states && k < h->used; k += parts) residual(h, k);
    if (h->lm_panels) {
        const Product lm = {h->states, h->lm_panels, h->lm_bias, h->logits, (int)h->used,
                            (int)h->hidden_size, size, 0};
        meet(parts);
        share(&lm, 0, (size + LANES - 1) / LANES, part, parts);
        meet(parts);
    }
    if (!h->values) return;
    for (int k = part; k < h->used; k += parts) {
        const float *x = h->logits + (ptrdiff_t)k * size;
        find_best(x, size, width, h->values + (ptrdiff_t)k * width, h->places + (ptrdiff_t)k * width);
        h->sums[k] = log_sum(x, size, 1.0f, NULL);
    }
    if (!h->tokens) return;
    meet(parts);
    for (int i = 0; part == 0 && i < h->nodes; i++) {
        const int64_t at = h->index[i] - 1;
        h->tokens[i] = at < 0 ? h->root : h->places[at];
        h->shares[i] = at < 0 ? NAN : expf(h->values[at] - h->sums[at / width]);
    }
}

EXPORT void propose(const Proposal *h) { together(propose_part, h, (int)h->threads); }

/* ln(x) of normal numbers to 2 units in the last place. */
INLINE vec logarithm(vec x) {
    ints bits = (ints)x, power = ((bits >> 23) & 255) - 126;
    vec m = (vec)((bits & 0x007fffff) | 0x3f000000); /* in [0.5, 1) */
    ints is_small = m < all(0.707106781f);
    m = pick(is_small, m + m, m) - 1.0f;
    vec e = __builtin_convertvector(power + is_small, vec), square = m * m;
    vec p = all(7.0376836292e-2f);
    p = fused(p, m, all(-1.1514610310e-1f));
    p = fused(p, m, all(1.1676998740e-1f));
    p = fused(p, m, all(-1.2420140846e-1f));
    p = fused(p, m, all(1.4249322787e-1f));
    p = fused(p, m, all(-1.6668057665e-1f));
    p = fused(p, m, all(2.0000714765e-1f));
    p = fused(p, m, all(-2.4999993993e-1f));
    p = fused(p, m, all(3.3333331174e-1f));
    p = p * m * square;
    p = fused(e, all(-2.12194440e-4f), p) - 0.5f * square;
    return fused(e, all(0.693359375f), m + p);
}

typedef uint32_t words __attribute__((vector_size(32)));

/* MurmurHash3's finaliser, as in acceptance.py. */
#define MIXED(x)                   \
    do {                           \
        x = (x ^ x >> 16) * 0x85EBCA6Bu; \
        x = (x ^ x >> 13) * 0xC2B2AE35u; \
        x = x ^ x >> 16;           \
    } while (0)

INLINE uint32_t mix(uint32_t x) {
    MIXED(x);
    return x;
}

/* Gumbel noise of a place in the text: a function of (seed, place, token) alone. */
static void noise_at(uint64_t seed, uint32_t place, float *out, int size) {
    const uint32_t low = (uint32_t)seed, high = (uint32_t)(seed >> 32);
    const uint32_t start = mix(low + 0x9E3779B9u);
    const uint32_t key = mix(start ^ (mix(place * 0x85EBCA77u + 1) + mix(start + high)));
    const uint32_t other = mix(key + 0x27D4EB2Fu);
    for (int j = 0; j < size; j += LANES) {
        words x;
        for (int l = 0; l < LANES; l++) x[l] = (uint32_t)(j + l) * 0x9E3779B1u + key;
        MIXED(x);
        x ^= other;
        MIXED(x);
        vec uniform = (__builtin_convertvector((ints)(x >> 9), vec) + 0.5f) * 0x1p-23f;
        vec gumbel = -logarithm(-logarithm(uniform));
        if (j + LANES <= size) store(out + j, gumbel);
        else
            for (int l = 0; j + l < size; l++) out[j + l] = gumbel[l];
    }
}

/* The backbone's own token after each node, and what it thought of the node itself.

   logits [rows, size]; parents, depths, tokens [rows]. temperature 0: no noise, and figures at 1.
   own [rows]: argmax of logits / temperature + noise, the first of equals. at_parent [rows]: the
   node's log-probability after its parent; entropies [rows] of the distribution after the node.
   noise [deepest + 1, size] and sums [rows] are worked in.

   path [rows], where it is wanted: the nodes that are accepted, the root first, and how many they
   are; exactly those that are the parent's own token, or with is_typical those above the parent's
   threshold [rows], min(epsilon, alpha * exp(-entropy)), the likeliest of the longest paths. */
typedef struct {
    const float *logits;
    const int64_t *parents, *depths, *tokens;
    int64_t *own, *path;
    float *at_parent, *entropies, *noise, *sums, *thresholds;
    uint64_t seed;
    int64_t rows, size, place, deepest, threads, is_typical, length, is_finite;
    float temperature, epsilon, alpha;
} Verdict;

static int64_t argmax(const float *x, const float *noise, int size, float temperature) {
    float most = -INFINITY;
    int64_t found = 0;
    vec best = all(-INFINITY);
    ints at = {0}, here = {0, 1, 2, 3, 4, 5, 6, 7};
    int j = 0;
    for (; j + LANES <= size; j += LANES, here += LANES) {
        vec y = load(x + j);
        if (noise) y = y / temperature + load(noise + j);
        ints is_more = y > best;
        best = pick(is_more, y, best);
        at = (is_more & here) | (~is_more & at);
    }
    for (int l = 0; l < LANES; l++)
        if (best[l] > most || (best[l] == most && at[l] < found)) most = best[l], found = at[l];
    for (; j < size; j++) {
        float y = noise ? x[j] / temperature + noise[j] : x[j];
        if (y > most) most = y, found = j;
    }
    return found;
}

/* Whether the numbers of a row can be chosen from: none invalid, the largest not infinite. */
static int is_sound(const float *x, int size) {
    float most = -INFINITY;
    int is_number = 1;
    for (int j = 0; j < size; j++) {
        is_number &= x[j] == x[j];
        most = x[j] > most ? x[j] : most;
    }
    return is_number && most < INFINITY && most > -INFINITY;
}

/* Which path is accepted; its last node's row says what comes next. */
static void choose(Verdict *v) {
    int64_t lengths[1024], best = 0;
    float values[1024];
    for (int64_t i = 0; i < v->rows; i++) {
        const int64_t p = v->parents[i];
        int is_taken = i == 0;
        values[i] = 0.0f;
        if (v->is_typical) {
            v->thresholds[i] = fminf(v->epsilon, v->alpha * expf(-v->entropies[i]));
            if (i) values[i] = values[p] + v->at_parent[i];
            if (i) is_taken = expf(v->at_parent[i]) > v->thresholds[p];
        } else if (i) is_taken = v->tokens[i] == v->own[p];
        lengths[i] = is_taken && (i == 0 || lengths[p]) ? v->depths[i] + 1 : 0;
        if (lengths[i] > lengths[best] || (lengths[i] == lengths[best] && values[i] > values[best]))
            best = i;
    }
    v->length = lengths[best];
    v->is_finite = is_sound(v->logits + best * v->size, (int)v->size);
    for (int64_t at = v->length; at--; best = v->parents[best]) v->path[at] = best;
}

static void judge_part(const void *what, int part, int parts) {
    const Verdict *v = what;
    const int size = (int)v->size;
    const int draws = v->temperature > 0 && v->own && !v->is_typical;
    const float temperature = v->temperature > 0 ? v->temperature : 1.0f;
    if (draws) {
        for (int d = part; d <= v->deepest; d += parts)
            noise_at(v->seed, (uint32_t)(v->place + 1 + d), v->noise + (ptrdiff_t)d * size, size);
        meet(parts);
    }
    for (int i = part; i < v->rows; i += parts) {
        const float *x = v->logits + (ptrdiff_t)i * size;
        const float *noise = draws ? v->noise + (ptrdiff_t)v->depths[i] * size : NULL;
        if (v->own) v->own[i] = argmax(x, noise, size, temperature);
        if (v->entropies) v->sums[i] = log_sum(x, size, temperature, v->entropies + i);
    }
    if (!v->entropies) {
        if (v->path) meet(parts);
        if (v->path && part == 0) choose((Verdict *)v);
        return;
    }
    meet(parts);
    for (int i = part; i < v->rows; i += parts) {
        const int64_t p = v->parents[i];
        v->at_parent[i] = v->logits[p * v->size + v->tokens[i]] / temperature - v->sums[p];
    }
    if (v->path) meet(parts);
    if (v->path && part == 0) choose((Verdict *)v);
}

EXPORT void judge(Verdict *v) { together(judge_part, v, (int)v->threads); }
