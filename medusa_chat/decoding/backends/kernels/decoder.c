/* A few rows through a decoder on a CPU: products, norms, rotary attention, gates; what of these a
   layer has, its description says (pass.h). In fp32, or
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
#include "experts.h"
#include "gates.h"
#include "half.h"
#include "packed.h"
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

/* Rows that stand `stride` apart in y. */
static void normalise_all(const Pass *pass, const float *x, const float *w, float *y, int stride) {
    const int size = (int)pass->decoder->hidden;
    for (int i = 0; i < pass->rows; i++)
        normalise(x + (ptrdiff_t)i * size, w, y + (ptrdiff_t)i * stride, size,
                  pass->decoder->epsilon);
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
static ptrdiff_t text_at(const Pass *pass, const Layer *layer, int row) {
    const ptrdiff_t text = layer->kv_heads * pass->decoder->capacity * layer->head_dim;
    return pass->texts ? pass->texts[row] * text : 0;
}

/* A key or a value to its place, counted in numbers. */
static void keep(const Decoder *m, void *all_kept, ptrdiff_t at, const float *x, int size) {
    if (m->is_half) narrow_all(x, (uint16_t *)all_kept + at, size);
    else memcpy((float *)all_kept + at, x, sizeof(float) * (size_t)size);
}

/* What one part of a pass has: where it works, alone and together with the other parts. */
typedef struct {
    const Pass *pass;
    int part, parts;
    float *queries, *keys, *values, *mixed, *gate, *up, *added, *routed; /* all parts' */
    float *own, *rows_own; /* all parts': the layers' own inputs, and the rows of their table */
    float *scores; /* of what all attend to together */
    float *residual, *embedded, *normed, *gathered, *scratch; /* its own */
} Part;

/* One head of a query or a key, normed and turned where it stands. */
static void turn_head(const Pass *pass, const Layer *layer, const float *norm, float *x, int row) {
    const int size = (int)layer->head_dim, rotary = (int)layer->rotary;
    const ptrdiff_t at = pass->positions[row] * rotary;
    if (norm) normalise(x, norm, x, size, pass->decoder->epsilon);
    if (rotary) rotate(x, layer->cosines + at, layer->sines + at, rotary);
}

/* Of one part's heads of keys and values the queries, turned where they stand, and the keys and
   values, put behind the text. */
static void place(const Part *p, const Layer *layer) {
    const Pass *pass = p->pass;
    const Decoder *m = pass->decoder;
    const int size = (int)layer->head_dim, kvs = (int)layer->kv_heads;
    const int groups = (int)layer->heads / kvs;
    const int kv = first(kvs, p->part, p->parts), last = first(kvs, p->part + 1, p->parts);
    for (int i = 0; i < pass->rows; i++) {
        float *query = p->queries + (ptrdiff_t)i * query_width(layer);
        float *key = p->keys + (ptrdiff_t)i * key_width(layer);
        float *value = p->values + (ptrdiff_t)i * key_width(layer);
        const int64_t place = pass->texts ? pass->positions[i] : pass->start + i;
        const ptrdiff_t at = text_at(pass, layer, i) + place * size;
        for (int h = kv * groups; h < last * groups; h++) {
            turn_head(pass, layer, layer->query_norm, query + h * size, i);
            if (!layer->growth) continue;
            const float factor = layer->growth[pass->positions[i]];
            for (int d = 0; d < size; d++) query[h * size + d] *= factor;
        }
        for (int h = kv; h < last && has(&layer->key); h++) {
            const ptrdiff_t to = at + h * m->capacity * size;
            if (!has(&layer->value))
                memcpy(value + h * size, key + h * size, sizeof(float) * (size_t)size);
            if (layer->value_norm)
                normalise(value + h * size, layer->value_norm, value + h * size, size, m->epsilon);
            turn_head(pass, layer, layer->key_norm, key + h * size, i);
            keep(m, layer->keys, to, key + h * size, size);
            keep(m, layer->values, to, value + h * size, size);
        }
    }
}

/* A token's row of an embedding [.., size], or else of a table. */
static void read_row(const void *embedding, int is_half, const Weights *table, int64_t token, int size,
                     float factor, float *x) {
    const vec scale = all(factor);
    if (!embedding) {
        unpack(table, size, &token, 1, x);
        for (int k = 0; k < size; k += LANES) store(x + k, load(x + k) * scale);
        return;
    }
    const uint16_t *halves_at = (const uint16_t *)embedding + token * size;
    const float *floats_at = (const float *)embedding + token * size;
    for (int k = 0; k < size; k += LANES) {
        const vec v = is_half ? widen(*(const halves *)(halves_at + k)) : load(floats_at + k);
        store(x + k, v * scale);
    }
}

static void embed(const Decoder *m, int64_t token, float *x) {
    read_row(m->embedding, (int)m->is_half, &m->table, token, (int)m->hidden, m->embedding_scale, x);
}

/* The widest of all layers, in numbers of a row, and floats that attention works in, and experts do,
   all parts' and a part's own. */
typedef struct {
    int64_t queries, keys, inner, input, attention, routed, gathered;
} Widths;

INLINE int64_t larger_of(int64_t a, int64_t b) { return a > b ? a : b; }

static Widths widths_of(const Decoder *m, int64_t rows, int64_t keys) {
    Widths w = {.input = m->hidden};
    for (int l = 0; l < m->count; l++) {
        const Layer *layer = m->layers + l;
        w.queries = larger_of(w.queries, query_width(layer));
        w.keys = larger_of(w.keys, key_width(layer));
        const int64_t experts = layer->experts.chosen;
        w.inner = larger_of(w.inner, layer->inner * larger_of(experts, 1));
        w.inner = larger_of(w.inner, m->own.width);
        if (layer->beside) w.input = 2 * m->hidden;
        w.attention = larger_of(w.attention, attention_size(m, layer, keys));
        if (!experts) continue;
        w.routed = larger_of(w.routed, mixture_size(layer, rows, m->hidden));
        w.gathered = larger_of(w.gathered, mixture_own_size(layer, rows, m->hidden));
    }
    return w;
}

/* The own inputs of all layers. */
INLINE int64_t own_width(const Decoder *m) { return m->count * m->own.width; }

/* Floats of a part's own. */
static int64_t own_size(const Decoder *m, const Widths *w, int64_t rows) {
    return rows * (m->hidden + 2 * w->input) + w->gathered + w->attention;
}

/* Floats that a pass of `rows` rows over `keys` tokens works in. */
EXPORT int64_t work_size(const Decoder *m, int64_t rows, int64_t keys, int64_t threads) {
    const Widths w = widths_of(m, rows, keys);
    const int64_t shared =
        rows * (2 * (w.queries + w.keys + w.inner + own_width(m)) + m->hidden) + w.routed;
    return shared + threads * (scores_size(keys) + own_size(m, &w, rows));
}

static Part part_of(const Pass *pass, int part, int parts) {
    const Decoder *m = pass->decoder;
    const int64_t rows = pass->rows;
    const Widths w = widths_of(m, rows, pass->keys);
    Part p = {.pass = pass, .part = part, .parts = parts};
    p.queries = pass->work;
    p.mixed = p.queries + rows * w.queries;
    p.keys = p.mixed + rows * w.queries;
    p.values = p.keys + rows * w.keys;
    p.gate = p.values + rows * w.keys;
    p.up = p.gate + rows * w.inner;
    p.added = p.up + rows * w.inner;
    p.own = p.added + rows * m->hidden;
    p.rows_own = p.own + rows * own_width(m);
    p.routed = p.rows_own + rows * own_width(m);
    p.scores = p.routed + w.routed;
    p.residual = p.scores + parts * scores_size(pass->keys) + part * own_size(m, &w, rows);
    p.normed = p.residual + rows * m->hidden;
    p.embedded = p.normed + rows * w.input;
    p.gathered = p.embedded + rows * w.input;
    p.scratch = p.gathered + w.gathered;
    return p;
}

/* Blocks of a key head's (row, head) pairs; rows of different texts are in none together. */
static int blocks_of(const Pass *pass, const Layer *layer) {
    const int groups = (int)(layer->heads / layer->kv_heads), rows = (int)pass->rows;
    if (pass->texts) return rows * ((groups + BLOCK - 1) / BLOCK);
    return (rows * groups + BLOCK - 1) / BLOCK;
}

/* Task number `task` of a layer's attention, a block of one key head: a row with a text of its own
   has it as in a pass of that row alone. */
static Attention attention_of(const Part *p, const Layer *layer, int task) {
    const int blocks = blocks_of(p->pass, layer), block = task % blocks;
    Attention a = {.pass = *p->pass,
                   .layer = *layer,
                   .queries = p->queries,
                   .mixed = p->mixed,
                   .kv = task / blocks,
                   .first = block * BLOCK};
    if (!p->pass->texts) return a;
    const int each = blocks / (int)p->pass->rows, row = block / each;
    const ptrdiff_t at = text_at(p->pass, layer, row), bytes = p->pass->decoder->is_half ? 2 : 4;
    a.pass.rows = 1, a.pass.positions += row, a.pass.start = *a.pass.positions;
    a.layer.keys = (char *)a.layer.keys + bytes * at;
    a.layer.values = (char *)a.layer.values + bytes * at;
    a.queries += (ptrdiff_t)row * query_width(layer);
    a.mixed += (ptrdiff_t)row * query_width(layer);
    a.first = block % each * BLOCK, a.pass.mask = NULL;
    return a;
}

/* As many tasks as all parts have one of, alone; those that are left, together. */
static void attend_all(const Part *p, const Layer *layer) {
    const int part = p->part, parts = p->parts;
    const int tasks = (int)layer->kv_heads * blocks_of(p->pass, layer);
    const int alone = takes_tiles(p->pass->decoder, layer) ? tasks : tasks / parts * parts;
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

/* The product of rows x by one linear to y. */
static Product product_of(const Part *p, const Linear *by, const float *x, float *y, int ins,
                          int outs) {
    return (Product){.x = x,
                     .weights = by->weights,
                     .bias = by->bias,
                     .y = y,
                     .rows = (int)p->pass->rows,
                     .ins = ins,
                     .outs = outs};
}

/* What was added, normed where the layer norms it, goes to the part's own residual. */
static void add_all(const Part *p, const Layer *layer, const float *norm) {
    const int rows = (int)p->pass->rows, size = (int)p->pass->decoder->hidden;
    for (int i = 0; i < rows; i++) {
        float *x = p->residual + (ptrdiff_t)i * size;
        const float *y = p->added + (ptrdiff_t)i * size;
        if (norm) {
            float *normed = p->normed + (ptrdiff_t)i * size;
            normalise(y, norm, normed, size, p->pass->decoder->epsilon);
            y = normed;
        }
        for (int k = 0; k < size; k += LANES)
            store(x + k, load(x + k) + load(y + k) * layer->residual);
    }
}

/* What a layer's attention reads, normed; its width. */
static int normed_input(const Part *p, const Layer *layer) {
    const int size = (int)p->pass->decoder->hidden, wide = layer->beside ? 2 * size : size;
    if (layer->beside) normalise_all(p->pass, p->embedded, layer->beside, p->normed, wide);
    normalise_all(p->pass, p->residual, layer->before, p->normed + (wide - size), wide);
    return wide;
}

/* The residual, with what attention adds. */
static void attend_layer(const Part *p, const Layer *layer) {
    const int part = p->part, parts = p->parts, size = (int)p->pass->decoder->hidden;
    const int queries = query_width(layer), keys = key_width(layer);
    const int ins = normed_input(p, layer);
    const Product read[] = {
        product_of(p, &layer->query, p->normed, p->queries, ins, queries),
        product_of(p, &layer->key, p->normed, p->keys, ins, keys),
        product_of(p, &layer->value, p->normed, p->values, ins, keys),
    };
    const Product out = product_of(p, &layer->out, p->mixed, p->added, queries, size);
    share_all(read, 1 + has(&layer->key) + has(&layer->value), part, parts);
    meet(part, parts);
    place(p, layer);
    meet(part, parts);
    attend_all(p, layer);
    meet(part, parts);
    share(&out, part, parts);
    meet(part, parts);
    add_all(p, layer, layer->mixed);
}

/* What the gated products add. A part has the same panels of gate and up, so that it needs nobody's
   to go on. */
static void multiply_gated(const Part *p, const Layer *layer) {
    const int size = (int)p->pass->decoder->hidden, inner = (int)layer->inner;
    const int panels = (inner + PANEL - 1) / PANEL, part = p->part, parts = p->parts;
    const int at = first(panels, part, parts), end = first(panels, part + 1, parts);
    const Product both[] = {
        product_of(p, &layer->gate, p->normed, p->gate, size, inner),
        product_of(p, &layer->up, p->normed, p->up, size, inner),
    };
    const Product down = product_of(p, &layer->down, p->gate, p->added, inner, size);
    multiply_alike(both, 2, at, end);
    activate(p->gate, p->up, layer, (int)p->pass->rows, PANEL * at, PANEL * end);
    meet(part, parts);
    share(&down, part, parts);
    meet(part, parts);
}

/* The same by experts. */
static void multiply_mixed(const Part *p, const Layer *layer) {
    const int64_t rows = p->pass->rows, size = p->pass->decoder->hidden;
    const Mixture m = {.layer = layer,
                       .rows = (int)rows,
                       .size = (int)size,
                       .scores = p->routed,
                       .gate = p->gate,
                       .up = p->up,
                       .outs = p->routed + rows * layer->experts.count,
                       .y = p->added,
                       .x = p->normed,
                       .gathered = p->gathered,
                       .lists = p->gathered + rows * size};
    mix_experts(&m, p->part, p->parts);
}

/* The residual, with what is added behind attention. */
static void feed_forward(const Part *p, const Layer *layer) {
    const int size = (int)p->pass->decoder->hidden;
    normalise_all(p->pass, p->residual, layer->after, p->normed, size);
    if (layer->experts.count) multiply_mixed(p, layer);
    else multiply_gated(p, layer);
    add_all(p, layer, layer->fed);
}

/* All layers' own inputs of every row, from the embeddings [rows, hidden]. */
static void make_own(const Part *p, const float *embedded) {
    const Decoder *m = p->pass->decoder;
    const OwnInputs *own = &m->own;
    const int rows = (int)p->pass->rows, part = p->part, parts = p->parts, wide = (int)own_width(m);
    const int size = (int)own->width, end = first(rows, part + 1, parts);
    const vec factor = all(1.0f / sqrtf((float)m->hidden)), half = all(0.70710678f);
    const Product by = product_of(p, &own->projection, embedded, p->own, (int)m->hidden, wide);
    share(&by, part, parts);
    meet(part, parts);
    for (int i = first(rows, part, parts); i < end; i++) {
        float *x = p->own + (ptrdiff_t)i * wide, *y = p->rows_own + (ptrdiff_t)i * wide;
        read_row(own->embedding, (int)m->is_half, &own->table, p->pass->tokens[i], wide, own->factor, y);
        for (int k = 0; k < wide; k += LANES) store(x + k, load(x + k) * factor);
        for (int k = 0; k < wide; k += size) normalise(x + k, own->norm, x + k, size, m->epsilon);
        for (int k = 0; k < wide; k += LANES) store(x + k, (load(x + k) + load(y + k)) * half);
    }
    meet(part, parts);
}

/* What layer `number` adds by its own inputs. */
static void add_own(const Part *p, const Layer *layer, int number) {
    const Decoder *m = p->pass->decoder;
    const int width = (int)m->own.width, size = (int)m->hidden, rows = (int)p->pass->rows;
    const int panels = (width + PANEL - 1) / PANEL, part = p->part, parts = p->parts;
    const int at = first(panels, part, parts), end = first(panels, part + 1, parts);
    const int from = at * PANEL, to = least(end * PANEL, width);
    const Product gate = product_of(p, &layer->own_gate, p->residual, p->gate, size, width);
    const Product out = product_of(p, &layer->own_out, p->gate, p->added, width, size);
    Layer narrow = *layer;
    narrow.inner = width;
    multiply_alike(&gate, 1, at, end);
    for (int i = 0; i < rows && from < to; i++)
        memcpy(p->up + (ptrdiff_t)i * width + from,
               p->own + i * own_width(m) + (ptrdiff_t)number * width + from,
               sizeof(float) * (size_t)(to - from));
    activate(p->gate, p->up, &narrow, rows, from, to);
    meet(part, parts);
    share(&out, part, parts);
    meet(part, parts);
    add_all(p, layer, layer->own_norm);
}

/* The residual, multiplied in the end. */
static void rescale(const Part *p, const Layer *layer) {
    const ptrdiff_t numbers = (ptrdiff_t)p->pass->rows * p->pass->decoder->hidden;
    for (ptrdiff_t k = 0; k < numbers && layer->scale != 1.0f; k += LANES)
        store(p->residual + k, load(p->residual + k) * layer->scale);
}

/* The residual of one part's rows behind layer `number`, where that is asked for. */
static void tap(const Part *p, int number) {
    const Pass *pass = p->pass;
    const int64_t size = pass->decoder->hidden, rows = pass->rows;
    for (int64_t t = 0; t < pass->tap_count; t++) {
        if (pass->taps[t] != number) continue;
        const int end = first((int)rows, p->part + 1, p->parts);
        for (int i = first((int)rows, p->part, p->parts); i < end; i++)
            memcpy(pass->tapped + (i * pass->tap_count + t) * size, p->residual + i * size,
                   sizeof(float) * (size_t)size);
    }
}

/* One part of a pass. Every part has the residual of all rows, and writes its share of them. */
static void decode(const void *what, int part, int parts) {
    const Pass *pass = what;
    const Decoder *m = pass->decoder;
    const Part p = part_of(pass, part, parts);
    const int rows = (int)pass->rows, end = first(rows, part + 1, parts);
    float *embedded = pass->states ? p.embedded : p.residual;
    for (int i = 0; i < rows; i++) embed(m, pass->tokens[i], embedded + i * m->hidden);
    if (pass->states)
        memcpy(p.residual, pass->states, sizeof(float) * (size_t)(rows * m->hidden));
    if (m->own.width) make_own(&p, embedded);
    for (int l = 0; l < m->count; l++) {
        attend_layer(&p, m->layers + l);
        feed_forward(&p, m->layers + l);
        if (m->own.width) add_own(&p, m->layers + l, l);
        rescale(&p, m->layers + l);
        tap(&p, l);
    }
    for (int i = first(rows, part, parts); i < end; i++)
        normalise(p.residual + i * m->hidden, m->norm, pass->hidden + i * m->hidden,
                  (int)m->hidden, m->epsilon);
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
