#pragma once

#include <stdint.h>

/* The backbone's own token after each node, and what it thought of the node itself.

   logits [rows, size]; parents, depths, tokens [rows]. temperature 0: no noise, and figures at 1.
   own [rows]: argmax of logits / temperature + noise, the first of equals. at_parent [rows]: the
   node's log-probability after its parent; entropies [rows] of the distribution after the node.
   noise [deepest + 1, size] and sums [rows] are worked in.

   path [rows], where it is wanted: the nodes that are accepted, the root first, and how many they
   are; exactly those that are the parent's own token, or with is_typical those above the parent's
   threshold [rows], min(epsilon, alpha * exp(-entropy)), the likeliest of the longest paths.
   certainty: of what comes after that path (logits.h), or 0 where it is under `least`, or
   that is 0 and nobody asks. */
typedef struct {
    const float *logits;
    const int64_t *parents, *depths, *tokens;
    int64_t *own, *path;
    float *at_parent, *entropies, *noise, *sums, *thresholds;
    uint64_t seed;
    int64_t rows, size, place, deepest, threads, is_typical, length, is_finite;
    float temperature, epsilon, alpha, least, certainty;
} Verdict;

/* One part of a verdict, for a team; part 0 chooses the path. */
void judge_part(const void *what, int part, int parts);
