/* A few rows through a decoder on a CPU: products, norms, rotary attention, gated SiLU. In fp32, or
   with weights of bf16 or a file's whole numbers, where what is multiplied with them is rounded to
   bf16, keys, values and queries too, and all else is fp32. The rows are of one text, or each is of
   a text of its own.

   Every number is summed in one order, whatever rows stand beside it: products along their inputs,
   attention along the text, or by groups of keys that are the same for every row. A row of a tree
   therefore has the bits that it has alone, and a tree decodes to plain decoding's tokens, bit for
   bit. Weights are read where torch holds them. Plain C with vectors of GCC and Clang; no library
   but libm. */

#include <math.h>
#include <stddef.h>
#include <string.h>

#include "attention.h"
#include "attention_tiles.h"
#include "half.h"
#include "pass.h"
#include "product.h"
#include "team.h"
#include "vectors.h"

/* size: whole vectors. */
static void normalise(const float *x, const float *w, float *y, int size, float epsilon) {
    vec even = all(0.0f), odd = all(0.0f);
    for (int k = 0; k < size; k += 2 * LANES) {
        even = fused(load(x + k), load(x + k), even);
        if (k + LANES < size) odd = fused(load(x + k + LANES), load(x + k + LANES), odd);
    }
    const float scale = 1.0f / sqrtf(total(even + odd) / (float)size + epsilon);
    for (int k = 0; k < size; k += LANES) store(y + k, load(x + k) * scale * load(w + k));
}

static void normalise_all(const Pass *pass, const float *x, const float *w, float *y) {
    const int size = (int)pass->decoder->hidden;
    const float epsilon = pass->decoder->epsilon;
    for (int i = 0; i < pass->rows; i++)
        normalise(x + (ptrdiff_t)i * size, w, y + (ptrdiff_t)i * size, size, epsilon);
}

/* x [size], where it stands. */
static void rotate(float *x, const float *cosines, const float *sines, int size) {
    const int half = size / 2;
    int d = 0;
    for (; d + LANES <= half; d += LANES) {
        const vec a = load(x + d), b = load(x + d + half);
        store(x + d, a * load(cosines + d) - b * load(sines + d));
        store(x + d + half, b * load(cosines + d + half) + a * load(sines + d + half));
    }
    for (; d < half; d++) {
        float a = x[d], b = x[d + half];
        x[d] = a * cosines[d] - b * sines[d];
        x[d + half] = b * cosines[d + half] + a * sines[d + half];
    }
}

/* Where the text of a row begins in a layer's keys and values. */
static ptrdiff_t text_at(const Pass *pass, int row) {
    const Decoder *m = pass->decoder;
    return pass->texts ? pass->texts[row] * m->kv_heads * m->capacity * m->head_dim : 0;
}

/* A key or a value to its place, counted in numbers. */
static void keep(const Decoder *m, void *all_kept, ptrdiff_t at, const float *x) {
    const int size = (int)m->head_dim;
    if (m->is_half) narrow_all(x, (uint16_t *)all_kept + at, size);
    else memcpy((float *)all_kept + at, x, sizeof(float) * (size_t)size);
}

/* Of the heads of keys and values from `kv` to `last` the queries, turned where they stand, and the
   keys and values, put behind the text. */
static void place(const Pass *pass, const Layer *layer, float *qkv, int kv, int last) {
    const Decoder *m = pass->decoder;
    const int size = (int)m->head_dim, heads = (int)m->heads, kvs = (int)m->kv_heads;
    const int groups = heads / kvs, rotary = (int)m->rotary;
    for (int i = 0; i < pass->rows; i++) {
        const float *cosines = m->cosines + pass->positions[i] * rotary;
        const float *sines = m->sines + pass->positions[i] * rotary;
        const int64_t place = pass->texts ? pass->positions[i] : pass->start + i;
        const ptrdiff_t at = text_at(pass, i) + place * size;
        float *from = qkv + (ptrdiff_t)i * qkv_width(m);
        for (int h = kv * groups; h < last * groups; h++)
            rotate(from + h * size, cosines, sines, rotary);
        for (int h = kv; h < last; h++) {
            const ptrdiff_t to = at + h * m->capacity * size;
            float *key = from + (heads + h) * size;
            rotate(key, cosines, sines, rotary);
            keep(m, layer->keys, to, key);
            keep(m, layer->values, to, from + (heads + kvs + h) * size);
        }
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

/* What one part of a pass has: where it works, alone and together with the other parts. */
typedef struct {
    const Pass *pass;
    int part, parts;
    float *qkv, *mixed, *gate_up, *active; /* all parts' */
    float *scores;                         /* of what all attend to together */
    float *normed, *scratch;               /* its own */
} Part;

/* A token's embedding. */
static void embed(const Decoder *m, int64_t token, float *x) {
    const int size = (int)m->hidden;
    if (!m->is_half) {
        memcpy(x, (const float *)m->embedding + token * size, sizeof(float) * (size_t)size);
        return;
    }
    const uint16_t *from = (const uint16_t *)m->embedding + token * size;
    for (int k = 0; k < size; k += LANES) store(x + k, widen(*(const halves *)(from + k)));
}

/* Floats of a part's own. */
static int64_t own_size(const Decoder *m, int64_t rows, int64_t keys) {
    return rows * m->hidden + attention_size(m, keys);
}

/* Floats that a pass of `rows` rows over `keys` tokens works in. */
EXPORT int64_t work_size(const Decoder *m, int64_t rows, int64_t keys, int64_t threads) {
    const int64_t shared = rows * (qkv_width(m) + m->heads * m->head_dim + 3 * m->inner);
    return shared + threads * (scores_size(keys) + own_size(m, rows, keys));
}

static Part part_of(const Pass *pass, int part, int parts) {
    const Decoder *m = pass->decoder;
    const int64_t rows = pass->rows, keys = pass->keys;
    Part p = {.pass = pass, .part = part, .parts = parts};
    p.qkv = pass->work;
    p.mixed = p.qkv + rows * qkv_width(m);
    p.gate_up = p.mixed + rows * m->heads * m->head_dim;
    p.active = p.gate_up + rows * 2 * m->inner;
    p.scores = p.active + rows * m->inner;
    p.normed = p.scores + parts * scores_size(keys) + part * own_size(m, rows, keys);
    p.scratch = p.normed + rows * m->hidden;
    return p;
}

/* Blocks of a key head's (row, head) pairs; rows of different texts are in none together. */
static int blocks_of(const Pass *pass) {
    const int groups = (int)(pass->decoder->heads / pass->decoder->kv_heads);
    const int rows = (int)pass->rows;
    if (pass->texts) return rows * ((groups + BLOCK - 1) / BLOCK);
    return (rows * groups + BLOCK - 1) / BLOCK;
}

/* Task number `task` of a layer's attention, a block of one key head: a row with a text of its own
   has it as in a pass of that row alone. */
static Attention attention_of(const Part *p, const Layer *layer, int task) {
    const Decoder *m = p->pass->decoder;
    const int blocks = blocks_of(p->pass), block = task % blocks;
    Attention a = {.pass = *p->pass,
                   .layer = *layer,
                   .qkv = p->qkv,
                   .mixed = p->mixed,
                   .kv = task / blocks,
                   .first = block * BLOCK};
    if (!p->pass->texts) return a;
    const int each = blocks / (int)p->pass->rows, row = block / each;
    const ptrdiff_t at = text_at(p->pass, row), bytes = m->is_half ? 2 : 4;
    a.pass.rows = 1, a.pass.positions += row, a.pass.start = *a.pass.positions;
    a.layer.keys = (char *)a.layer.keys + bytes * at;
    a.layer.values = (char *)a.layer.values + bytes * at;
    a.qkv += (ptrdiff_t)row * qkv_width(m), a.mixed += row * m->heads * m->head_dim;
    a.first = block % each * BLOCK, a.pass.free = a.pass.start + 1;
    return a;
}

/* As many tasks as all parts have one of, alone; those that are left, together. */
static void attend_all(const Part *p, const Layer *layer) {
    const Decoder *m = p->pass->decoder;
    const int part = p->part, parts = p->parts;
    const int tasks = (int)m->kv_heads * blocks_of(p->pass);
    const int alone = takes_tiles(m) ? tasks : tasks / parts * parts;
    const ptrdiff_t size = scores_size(p->pass->keys);
    for (int t = first(alone, part, parts); t < first(alone, part + 1, parts); t++) {
        const Attention a = attention_of(p, layer, t);
        attend(&a, p->scratch);
    }
    for (int step = 0; step < STEPS && alone < tasks; step++) {
        if (step) meet(part, parts);
        for (int t = alone; t < tasks; t++) {
            const Attention a = attention_of(p, layer, t);
            attend_step(&a, step, p->scores + (t - alone) * size, p->scratch, part, parts);
        }
    }
}

/* The product x [rows, ins] w^T of outputs `at` to `at + outs` of rows of y, `apart` floats each. */
static Product product_of(const Pass *pass, const float *x, int ins, Weights w, const float *bias,
                          float *y, int at, int outs, int apart) {
    return (Product){.x = x,
                     .weights = w,
                     .bias = bias ? bias + at : NULL,
                     .y = y + at,
                     .rows = (int)pass->rows,
                     .ins = ins,
                     .outs = outs,
                     .apart = apart};
}

/* A product that is added to the hidden states, by all. */
static void add_to_hidden(const Part *p, const float *x, int ins, Weights w, const float *bias) {
    const int size = (int)p->pass->decoder->hidden;
    Product added = product_of(p->pass, x, ins, w, bias, p->pass->hidden, 0, size, size);
    added.adds = 1;
    share(&added, p->part, p->parts);
    meet(p->part, p->parts);
}

/* The hidden states, with what attention adds. */
static void attend_layer(const Part *p, const Layer *layer) {
    const Pass *pass = p->pass;
    const Decoder *m = pass->decoder;
    const int size = (int)m->hidden, part = p->part, parts = p->parts;
    const int mixes = (int)(m->heads * m->head_dim), keys = (int)(m->kv_heads * m->head_dim);
    const int kv = first((int)m->kv_heads, part, parts), width = qkv_width(m);
    const int last = first((int)m->kv_heads, part + 1, parts);
    const float *x = p->normed, *bias = layer->qkv_bias;
    const Product all[] = {
        product_of(pass, x, size, layer->query, bias, p->qkv, 0, mixes, width),
        product_of(pass, x, size, layer->key, bias, p->qkv, mixes, keys, width),
        product_of(pass, x, size, layer->value, bias, p->qkv, mixes + keys, keys, width)};
    normalise_all(pass, pass->hidden, layer->before, p->normed);
    share_all(all, 3, part, parts);
    meet(part, parts);
    place(pass, layer, p->qkv, kv, last);
    meet(part, parts);
    attend_all(p, layer);
    meet(part, parts);
    add_to_hidden(p, p->mixed, mixes, layer->out, layer->out_bias);
}

/* The hidden states, with what the gated products add. */
static void feed_forward(const Part *p, const Layer *layer) {
    const Pass *pass = p->pass;
    const int rows = (int)pass->rows, size = (int)pass->decoder->hidden;
    const int inner = (int)pass->decoder->inner, panels = inner / PANEL;
    const int at = first(panels, p->part, p->parts), end = first(panels, p->part + 1, p->parts);
    const float *x = p->normed, *bias = layer->gate_up_bias;
    const Product both[] = {
        product_of(pass, x, size, layer->gate, bias, p->gate_up, 0, inner, 2 * inner),
        product_of(pass, x, size, layer->up, bias, p->gate_up, inner, inner, 2 * inner)};
    normalise_all(pass, pass->hidden, layer->after, p->normed);
    for (int i = 0; i < 2 && at < end; i++) {
        const Product one = ready(both + i);
        multiply(&one, at, end);
    }
    activate(p->gate_up, p->active, rows, inner, PANEL * at, PANEL * end);
    meet(p->part, p->parts);
    add_to_hidden(p, p->active, inner, layer->down, layer->down_bias);
}

/* One part of a pass: hidden is whole once all have met, and normed by part 0. */
static void decode(const void *what, int part, int parts) {
    const Pass *pass = what;
    const Decoder *m = pass->decoder;
    const Part p = part_of(pass, part, parts);
    const int rows = (int)pass->rows, end = first(rows, part + 1, parts);
    for (int i = first(rows, part, parts); i < end; i++)
        embed(m, pass->tokens[i], pass->hidden + i * m->hidden);
    meet(part, parts);
    for (int l = 0; l < m->count; l++) {
        attend_layer(&p, m->layers + l);
        feed_forward(&p, m->layers + l);
    }
    if (part == 0) normalise_all(pass, pass->hidden, m->norm, pass->hidden);
}

/* Whether every row lies within the embeddings and the cache. */
static int is_within(const Pass *pass) {
    const Decoder *m = pass->decoder;
    if (!pass->texts && (pass->start < 0 || pass->start + pass->rows > m->capacity)) return 0;
    for (int64_t i = 0; i < pass->rows; i++) {
        if (pass->tokens[i] < 0 || pass->tokens[i] >= m->vocabulary) return 0;
        if (pass->positions[i] < 0 || pass->positions[i] >= m->capacity) return 0;
    }
    return 1;
}

/* 0, or 1 where a row lies outside of the embeddings or of the cache: nothing is done then. */
EXPORT int64_t run(const Pass *pass) {
    if (!is_within(pass)) return 1;
    together(decode, pass, (int)pass->threads);
    return 0;
}
