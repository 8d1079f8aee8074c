/* Robust statistics over the columns of n updates, for one element type (REAL) and one thread.
 *
 * Callers cut the columns among threads. Every result is a function of the numbers alone, not of the machine: columns are
 * treated one by one in a fixed order of operations without fused multiply-add, and the inner products of `gram` are sums
 * of whole numbers below 2^53, which are exact in any order. blocked.py computes the same bits with torch.
 *
 * rows: n pointers to `width` numbers each. mix: NULL, or mixed x n factors: the updates are then the `mixed` combinations
 * of the rows, rounded to REAL. bad[i] becomes 1 where row i has a number that is not finite, or beyond float32's range;
 * whatever else a call returns is then of no use.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifndef REAL
#define REAL float
#endif
#define LANES 8
#define GROUP 128          /* columns that are treated at once; gram's whole numbers are exact within a group */
#define STRIP 32
#define GROUPS_OF_PAGE 64  /* gram gives one partial sum a page, so that threads do not change the order of additions */
#define SMALLEST 1e-300
#define LARGEST 1e300
#define BITS 23            /* of gram's whole numbers: 2 * 23 bits + 7 bits of 128 columns = 53 */

enum { MEDIAN, TRIMMED, NEAREST };

typedef double wide __attribute__((vector_size(LANES * sizeof(double))));

/* While a group is sorted the next one is on its way: so many streams are more than processors foresee by themselves. */
static void load(const REAL *const *rows, int n, int64_t at, int w, int64_t width, REAL *tile, uint8_t *bad) {
  int64_t ahead = width - at - w < GROUP ? width - at - w : GROUP;
  for (int i = 0; i < n; i++) {
    REAL *to = tile + (int64_t)i * GROUP;
    for (int64_t k = 0; k < ahead; k += 64 / (int64_t)sizeof(REAL)) __builtin_prefetch(rows[i] + at + w + k);
    memcpy(to, rows[i] + at, (size_t)w * sizeof(REAL));
    if (w < GROUP) memset(to + w, 0, (size_t)(GROUP - w) * sizeof(REAL));
    if (sizeof(REAL) == 4) {
      const uint32_t *bits = (const uint32_t *)to;
      uint32_t largest = 0;
      for (int k = 0; k < GROUP; k++) {
        uint32_t magnitude = bits[k] & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
      }
      if (largest >= 0x7f800000u) bad[i] = 1;
    } else {
      const uint64_t *bits = (const uint64_t *)to;
      uint64_t largest = 0;
      for (int k = 0; k < GROUP; k++) {
        uint64_t magnitude = bits[k] & 0x7fffffffffffffffull;
        largest = magnitude > largest ? magnitude : largest;
      }
      if (largest > 0x47efffffe0000000ull) bad[i] = 1; /* float32's largest number */
    }
  }
}

static void combine_tile(const REAL *tile, int n, const double *factors, double *restrict sum) {
  memset(sum, 0, GROUP * sizeof(double));
  for (int i = 0; i < n; i++) {
    double factor = factors[i];
    const REAL *row = tile + (int64_t)i * GROUP;
    if (factor == 0.0) continue; /* adding nothing changes no bit */
    for (int k = 0; k < GROUP; k++) sum[k] = sum[k] + factor * (double)row[k];
  }
}

static REAL *updates(const REAL *const *rows, int n, int64_t at, int w, int64_t width, const double *mix, int mixed,
                     REAL *tile, REAL *mixed_tile, uint8_t *bad) {
  double sum[GROUP];
  load(rows, n, at, w, width, tile, bad);
  if (!mix) return tile;
  for (int i = 0; i < mixed; i++) {
    REAL *to = mixed_tile + (int64_t)i * GROUP;
    combine_tile(tile, n, mix + (int64_t)i * n, sum);
    for (int k = 0; k < GROUP; k++) to[k] = (REAL)sum[k];
  }
  return mixed_tile;
}

/* Here nothing is added up, and what is not finite was noticed before: so minima and maxima are one instruction each. */
__attribute__((optimize("finite-math-only", "no-signed-zeros"))) static void sort(REAL *tile, const int32_t *network, int64_t comparators) {
  for (int64_t c = 0; c < comparators; c++) {
    REAL *restrict low = tile + (int64_t)network[2 * c] * GROUP;
    REAL *restrict high = tile + (int64_t)network[2 * c + 1] * GROUP;
    for (int k = 0; k < GROUP; k++) {
      REAL a = low[k], b = high[k];
      low[k] = a < b ? a : b;
      high[k] = a < b ? b : a;
    }
  }
}

/* By value, and by weight where values are equal: so the order of rows does not matter. */
static void sort_with_weights(REAL *tile, REAL *weights, const int32_t *network, int64_t comparators) {
  for (int64_t c = 0; c < comparators; c++) {
    int64_t i = (int64_t)network[2 * c] * GROUP, j = (int64_t)network[2 * c + 1] * GROUP;
    REAL *restrict low = tile + i, *restrict high = tile + j;
    REAL *restrict low_weight = weights + i, *restrict high_weight = weights + j;
    for (int k = 0; k < GROUP; k++) {
      REAL a = low[k], b = high[k], p = low_weight[k], q = high_weight[k];
      int in_order = (a < b) | ((a == b) & (p <= q));
      low[k] = in_order ? a : b;
      high[k] = in_order ? b : a;
      low_weight[k] = in_order ? p : q;
      high_weight[k] = in_order ? q : p;
    }
  }
}

static void median(const REAL *sorted, int n, double *restrict middle) {
  const REAL *low = sorted + (int64_t)((n - 1) / 2) * GROUP, *high = sorted + (int64_t)(n / 2) * GROUP;
  for (int k = 0; k < GROUP; k++) middle[k] = ((double)low[k] + (double)high[k]) * 0.5;
}

static void weighted_median(const REAL *sorted, const REAL *weights, int n, double *restrict middle) {
  double half[GROUP], below[GROUP], low[GROUP], high[GROUP];
  memset(half, 0, sizeof half);
  memset(below, 0, sizeof below);
  for (int i = 0; i < n; i++)
    for (int k = 0; k < GROUP; k++) half[k] = half[k] + (double)weights[(int64_t)i * GROUP + k];
  for (int k = 0; k < GROUP; k++) half[k] = half[k] * 0.5;
  for (int i = 0; i < n; i++) {
    const REAL *row = sorted + (int64_t)i * GROUP, *weight = weights + (int64_t)i * GROUP;
    for (int k = 0; k < GROUP; k++) {
      double value = (double)row[k];
      /* The last row that begins below the half, and the last that begins at or below it. */
      low[k] = (i == 0 || below[k] < half[k]) ? value : low[k];
      high[k] = (i == 0 || (below[k] <= half[k] && weight[k] > 0)) ? value : high[k];
      below[k] = below[k] + (double)weight[k];
    }
  }
  for (int k = 0; k < GROUP; k++) middle[k] = (low[k] + high[k]) * 0.5;
}

/* The mean of the rows from `first` to before `last`, which is what is left of a trimmed column. */
static void trimmed(const REAL *sorted, const REAL *weights, int first, int last, double *restrict value) {
  double total[GROUP];
  if (!weights) { /* a few columns at a time, whose sums stay in registers */
    double count = last - first;
    for (int at = 0; at < GROUP; at += STRIP) {
      double sum[STRIP] = {0};
      for (int i = first; i < last; i++) {
        const REAL *row = sorted + (int64_t)i * GROUP + at;
        for (int k = 0; k < STRIP; k++) sum[k] = sum[k] + (double)row[k];
      }
      for (int k = 0; k < STRIP; k++) value[at + k] = sum[k] / count;
    }
    return;
  }
  memset(value, 0, GROUP * sizeof(double));
  memset(total, 0, sizeof total);
  for (int i = first; i < last; i++) {
    const REAL *row = sorted + (int64_t)i * GROUP, *weight = weights + (int64_t)i * GROUP;
    for (int k = 0; k < GROUP; k++) {
      value[k] = value[k] + (double)weight[k] * (double)row[k];
      total[k] = total[k] + (double)weight[k];
    }
  }
  for (int k = 0; k < GROUP; k++) value[k] = value[k] / total[k];
}

/* The mean of the `kept` rows nearest to the middle: a window of the sorted column. Of two at the same distance the smaller. */
static void nearest(const REAL *sorted, const REAL *weights, int n, int kept, const double *middle, double *restrict value) {
  double total[GROUP];
  memset(value, 0, GROUP * sizeof(double));
  memset(total, 0, sizeof total);
  for (int i = 0; i < n; i++) {
    const REAL *row = sorted + (int64_t)i * GROUP, *weight = weights ? weights + (int64_t)i * GROUP : NULL;
    const REAL *above = i < n - kept ? sorted + (int64_t)(i + kept) * GROUP : row;
    const REAL *below = i >= kept ? sorted + (int64_t)(i - kept) * GROUP : row;
    int may_be_low = i < n - kept, may_be_high = i >= kept;
    for (int k = 0; k < GROUP; k++) {
      double here = (double)row[k], center = middle[k];
      int low_goes = may_be_low & (((double)above[k] - center) < (center - here));
      int high_stays = !may_be_high | ((here - center) < (center - (double)below[k]));
      double share = (high_stays & (1 - low_goes)) ? (weight ? (double)weight[k] : 1.0) : 0.0;
      value[k] = value[k] + share * here;
      total[k] = total[k] + share;
    }
  }
  for (int k = 0; k < GROUP; k++) value[k] = value[k] / total[k];
}

/* outside[n] counts the columns in which anybody is: where all are equal, such as under pixels that are always dark, a
 * column tells nothing of anybody. */
static void count_outside(const REAL *tile, int n, int w, const REAL *low, const REAL *high, int64_t *outside) {
  uint8_t told[GROUP] = {0};
  for (int i = 0; i < n; i++) {
    const REAL *row = tile + (int64_t)i * GROUP;
    int32_t count = 0;
    for (int k = 0; k < w; k++) {
      uint8_t is_outside = (row[k] < low[k]) | (row[k] > high[k]);
      told[k] |= is_outside;
      count += is_outside;
    }
    outside[i] += count;
  }
  for (int k = 0; k < w; k++) outside[n] += told[k];
}

/* out[k]: the median, the trimmed mean or the mean around the median of column k. outside[i] counts the columns in which
 * update i is not among the n - 2 * trim in the middle; it is counted in one group of `every`, by place (`offset`);
 * outside[m]: in how many of these columns anybody was. */
int order_columns(const REAL *const *rows, int n, int64_t width, const double *mix, int mixed, const double *weights,
                  const int32_t *network, int64_t comparators, int kind, int kept, int trim, int64_t offset, int every,
                  REAL *out, uint8_t *bad, int64_t *outside) {
  int m = mix ? mixed : n;
  size_t tile_bytes = (size_t)GROUP * sizeof(REAL);
  REAL *scratch = aligned_alloc(64, ((size_t)n + 4 * (size_t)m) * tile_bytes);
  if (!scratch) return 1;
  REAL *tile = scratch, *mixed_tile = tile + (size_t)n * GROUP, *copy = mixed_tile + (size_t)m * GROUP;
  REAL *plain_weights = copy + (size_t)m * GROUP, *sorted_weights = plain_weights + (size_t)m * GROUP;
  double middle[GROUP], value[GROUP];
  if (weights)
    for (int i = 0; i < m; i++)
      for (int k = 0; k < GROUP; k++) plain_weights[(int64_t)i * GROUP + k] = (REAL)weights[i];
  for (int64_t at = 0; at < width;) {
    int64_t room = GROUP - (offset + at) % GROUP; /* groups stand at multiples of their size, wherever the columns are cut */
    int w = (int)(width - at < room ? width - at : room);
    int counted = (offset + at) / GROUP % every == 0;
    REAL *unsorted = updates(rows, n, at, w, width, mix, mixed, tile, mixed_tile, bad), *sorted = unsorted;
    if (counted) sorted = memcpy(copy, unsorted, (size_t)m * tile_bytes);
    if (weights) {
      memcpy(sorted_weights, plain_weights, (size_t)m * tile_bytes);
      sort_with_weights(sorted, sorted_weights, network, comparators);
    } else {
      sort(sorted, network, comparators);
    }
    const REAL *by = weights ? sorted_weights : NULL;
    if (kind != TRIMMED) {
      if (by) weighted_median(sorted, by, m, middle);
      else median(sorted, m, middle);
    }
    if (kind == TRIMMED) trimmed(sorted, by, trim, m - trim, value);
    else if (kind == NEAREST) nearest(sorted, by, m, kept, middle, value);
    else memcpy(value, middle, sizeof middle);
    for (int k = 0; k < w; k++) out[at + k] = (REAL)(value[k] + 0.0); /* one zero only, the positive one */
    if (counted)
      count_outside(unsorted, m, w, sorted + (int64_t)trim * GROUP, sorted + (int64_t)(m - 1 - trim) * GROUP, outside);
    at += w;
  }
  free(scratch);
  return 0;
}

/* Whole numbers of BITS bits, in units of the row's own power of two in this group. */
static double quantise(const REAL *row, const REAL *reference, int w, double *restrict to) {
  double largest = 0.0;
  for (int k = 0; k < GROUP; k++) {
    double centred = k < w ? (double)row[k] - (double)reference[k] : 0.0;
    double magnitude = fabs(centred);
    to[k] = centred;
    largest = magnitude > largest ? magnitude : largest;
  }
  if (!(largest > SMALLEST && largest < LARGEST)) { /* beyond these, powers of two run over: seen as zeros */
    memset(to, 0, GROUP * sizeof(double));
    return 0.0;
  }
  int exponent;
  frexp(largest, &exponent);
  double scale = ldexp(1.0, BITS - exponent);
  for (int k = 0; k < GROUP; k++) to[k] = nearbyint(to[k] * scale);
  return ldexp(1.0, exponent - BITS);
}

static double lanes(wide sum) {
  return ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
}

/* Contraction is safe here: every product and every sum is exact. */
__attribute__((optimize("fp-contract=fast"))) static void multiply(const double *whole, const double *unit, int m, double *sums) {
  for (int i = 0; i < m; i += 4)
    for (int j = i; j < m; j += 4) {
      wide dot[4][4];
      memset(dot, 0, sizeof dot);
      for (int k = 0; k < GROUP; k += LANES)
        for (int a = 0; a < 4; a++) {
          wide x = *(const wide *)(whole + (int64_t)(i + a) * GROUP + k);
          for (int b = 0; b < 4; b++) dot[a][b] += x * *(const wide *)(whole + (int64_t)(j + b) * GROUP + k);
        }
      for (int a = 0; a < 4 && i + a < m; a++)
        for (int b = 0; b < 4 && j + b < m; b++)
          sums[(int64_t)(i + a) * m + (j + b)] += lanes(dot[a][b]) * (unit[i + a] * unit[j + b]);
    }
}

/* pages: for each page of columns m x m sums of products of the updates, centred at the lower median of each column; only
 * what is on and above the diagonal is of use. With `origin` a last update of zeros is added. */
int gram_columns(const REAL *const *rows, int n, int64_t width, const double *mix, int mixed, int origin,
                 const int32_t *network, int64_t comparators, double *pages, uint8_t *bad) {
  int given = mix ? mixed : n, m = given + (origin ? 1 : 0), padded = (m + 3) / 4 * 4;
  size_t tile_bytes = (size_t)GROUP * sizeof(REAL);
  REAL *scratch = aligned_alloc(64, ((size_t)n + 2 * (size_t)m) * tile_bytes);
  double *whole = aligned_alloc(64, (size_t)padded * GROUP * sizeof(double));
  double *unit = calloc((size_t)padded, sizeof(double));
  if (!scratch || !whole || !unit) {
    free(scratch), free(whole), free(unit);
    return 1;
  }
  REAL *tile = scratch, *mixed_tile = tile + (size_t)n * GROUP, *sorted = mixed_tile + (size_t)m * GROUP;
  memset(whole, 0, (size_t)padded * GROUP * sizeof(double));
  for (int64_t at = 0, group = 0; at < width; at += GROUP, group++) {
    int w = (int)(width - at < GROUP ? width - at : GROUP);
    const REAL *unsorted = updates(rows, n, at, w, width, mix, mixed, tile, mixed_tile, bad);
    memcpy(sorted, unsorted, (size_t)given * tile_bytes);
    if (origin) memset(sorted + (size_t)given * GROUP, 0, tile_bytes);
    sort(sorted, network, comparators);
    const REAL *reference = sorted + (int64_t)((m - 1) / 2) * GROUP;
    static const REAL zeros[GROUP];
    for (int i = 0; i < m; i++)
      unit[i] = quantise(i < given ? unsorted + (int64_t)i * GROUP : zeros, reference, w, whole + (int64_t)i * GROUP);
    multiply(whole, unit, m, pages + group / GROUPS_OF_PAGE * m * m);
  }
  free(scratch), free(whole), free(unit);
  return 0;
}

/* out[k]: the sum of factors[i] * update i in column k. out may be one of the rows. */
int combine_columns(const REAL *const *rows, int n, int64_t width, const double *factors, REAL *out, uint8_t *bad) {
  double sum[GROUP];
  REAL *tile = aligned_alloc(64, (size_t)n * GROUP * sizeof(REAL));
  if (!tile) return 1;
  for (int64_t at = 0; at < width; at += GROUP) {
    int w = (int)(width - at < GROUP ? width - at : GROUP);
    load(rows, n, at, w, width, tile, bad);
    combine_tile(tile, n, factors, sum);
    for (int k = 0; k < w; k++) out[at + k] = (REAL)(sum[k] + 0.0);
  }
  free(tile);
  return 0;
}
