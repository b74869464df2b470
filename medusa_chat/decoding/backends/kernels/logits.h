/* What is read from one row of logits. */

#pragma once

#include <stdint.h>

/* log(sum(exp(x / temperature))), and where it is wanted the entropy of that distribution in
   nats. */
float log_sum(const float *x, int size, float temperature, float *entropy);

/* The `count` largest in falling order, the first of equals first, and their places. */
void find_best(const float *x, int size, int count, float *values, int64_t *places);

/* The place of the largest x / temperature + noise, the first of equals; noise NULL: of x. */
int64_t argmax(const float *x, const float *noise, int size, float temperature);

/* How certain a token is: its probability beside that of the likeliest other one alone. */
float certainty(const float *x, int size, float temperature, int64_t place);

/* Whether a row can be chosen from: no number invalid, the largest not infinite. */
int is_sound(const float *x, int size);
