/* The rows of one table shard: an index from 64-bit ids to records that lie one after another.
 *
 * Nothing here allocates: the caller hands in all memory and sees to it that there is room (native.py). Every result is
 * a function of the numbers alone: rows are treated in the order in which their ids come, element by element, without
 * fused multiply-add, and the one sum over a row has a fixed shape. plain.py computes the same bits with numpy.
 *
 * A record is: id (64 bits), mark (40 bits: the update that changed it last; 24 bits: how many have), values, and what
 * the optimizer keeps. An entry of the index is the low half of the id's hash and the record's number + 1; 0 is empty.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define AHEAD 128             /* ids whose entries are asked for before they are used */
#define SOON 8                 /* rows whose records are */
#define HEADER 4              /* words of 32 bits */
#define USES_BITS 24
#define USES_MAX ((1u << USES_BITS) - 1)
#define LANES 16
#define LINES_MAX 16          /* cache lines of a record that are asked for early */
#define GOLDEN 0x9e3779b97f4a7c15ull

enum { SGD, ADAGRAD, ROWWISE_ADAGRAD, ADAM, ADAMW };
enum { UNIFORM, NORMAL };

typedef struct {
  uint64_t *entries;
  int64_t bits; /* of a position in the index */
  uint32_t *records;
  int64_t words; /* of a record */
  int64_t dim;
  int64_t count;
  uint64_t seed;
  int64_t kind; /* of first values */
  float scale;
} rows_t;

typedef struct {
  uint64_t id;
  uint64_t mark; /* 0: empty */
} entry_t;

typedef struct {
  entry_t *entries;
  int64_t bits;
  int64_t count;
} marks_t;

typedef struct {
  int64_t kind;
  float lr, decay, eps, first, second, rest_first, rest_second; /* betas, and what is left of 1 */
  const float *correction_first, *correction_second;            /* by the number of the row's update */
  int64_t corrections;
} rule_t;

static inline uint64_t mix(uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdull;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ull;
  x ^= x >> 33;
  return x;
}

static inline uint32_t *record(const rows_t *rows, int64_t row) { return rows->records + row * rows->words; }
static inline uint64_t id_of(const uint32_t *r) {
  uint64_t id;
  memcpy(&id, r, 8);
  return id;
}
static inline uint64_t mark_of(const uint32_t *r) {
  uint64_t mark;
  memcpy(&mark, r + 2, 8);
  return mark;
}
static inline void set_mark(uint32_t *r, uint64_t mark) { memcpy(r + 2, &mark, 8); }

static inline int64_t find(const rows_t *rows, uint64_t id, uint64_t hash) {
  uint64_t mask = (1ull << rows->bits) - 1;
  for (uint64_t at = hash >> (64 - rows->bits);; at = (at + 1) & mask) {
    uint64_t entry = rows->entries[at];
    if (!entry) return -1;
    if ((uint32_t)(entry >> 32) != (uint32_t)hash) continue;
    int64_t row = (int64_t)(uint32_t)entry - 1;
    if (id_of(record(rows, row)) == id) return row;
  }
}

static inline void ask_for(const void *at, int64_t bytes, int to_write) {
  const char *line = at;
  int64_t lines = bytes / 64 + 1;
  if (lines > LINES_MAX) lines = LINES_MAX;
  for (int64_t i = 0; i < lines; i++) {
    if (to_write)
      __builtin_prefetch(line + 64 * i, 1);
    else
      __builtin_prefetch(line + 64 * i, 0);
  }
}

/* Where the rows of up to AHEAD ids are, by half of the hash only: no record has to be in the cache yet. -1: none. */
static void guess(const rows_t *rows, const uint64_t *ids, int n, int64_t *found, uint64_t *hashes) {
  uint64_t mask = (1ull << rows->bits) - 1;
  for (int i = 0; i < n; i++) {
    hashes[i] = mix(ids[i]);
    __builtin_prefetch(rows->entries + (hashes[i] >> (64 - rows->bits)));
  }
  for (int i = 0; i < n; i++) {
    found[i] = -1;
    for (uint64_t at = hashes[i] >> (64 - rows->bits), entry; (entry = rows->entries[at]); at = (at + 1) & mask)
      if ((uint32_t)(entry >> 32) == (uint32_t)hashes[i]) {
        found[i] = (int64_t)(uint32_t)entry - 1;
        break;
      }
  }
}

static inline int64_t checked(const rows_t *rows, uint64_t id, uint64_t hash, int64_t guessed) {
  if (guessed < 0 || id_of(record(rows, guessed)) == id) return guessed;
  return find(rows, id, hash);
}

static void find_some(const rows_t *rows, const uint64_t *ids, int n, int64_t *found) {
  uint64_t hashes[AHEAD];
  guess(rows, ids, n, found, hashes);
  for (int i = 0; i < n; i++)
    if (found[i] >= 0) __builtin_prefetch(record(rows, found[i]));
  for (int i = 0; i < n; i++) found[i] = checked(rows, ids[i], hashes[i], found[i]);
}

static void first_values(const rows_t *rows, uint64_t id, float *restrict to) {
  uint64_t base = mix(mix(id) ^ rows->seed);
  float scale = rows->scale;
  if (rows->kind == UNIFORM) {
    for (int64_t k = 0; k < rows->dim; k++) {
      uint64_t drawn = mix(base + (uint64_t)(k + 1) * GOLDEN);
      to[k] = ((float)(uint32_t)(drawn >> 40) * 0x1p-23f - 1.0f) * scale;
    }
  } else { /* the sum of four numbers of 16 bits is near enough to a normal one, and the same everywhere */
    for (int64_t k = 0; k < rows->dim; k++) {
      uint64_t drawn = mix(base + (uint64_t)(k + 1) * GOLDEN);
      int32_t sum = (int32_t)(drawn & 0xffff) + (int32_t)(drawn >> 16 & 0xffff) + (int32_t)(drawn >> 32 & 0xffff) +
                    (int32_t)(drawn >> 48);
      to[k] = (float)(sum - 131070) * scale;
    }
  }
}

/* Values of rows, and the first values where there is no row. */
void look_up(const rows_t *rows, const uint64_t *ids, int64_t n, float *restrict out) {
  int64_t found[AHEAD], dim = rows->dim, bytes = (HEADER + dim) * 4;
  uint64_t hashes[AHEAD];
  for (int64_t start = 0; start < n; start += AHEAD) {
    int some = n - start < AHEAD ? (int)(n - start) : AHEAD;
    guess(rows, ids + start, some, found, hashes);
    for (int i = 0; i < SOON && i < some; i++)
      if (found[i] >= 0) ask_for(record(rows, found[i]), bytes, 0);
    for (int i = 0; i < some; i++) {
      if (i + SOON < some && found[i + SOON] >= 0) ask_for(record(rows, found[i + SOON]), bytes, 0);
      float *restrict to = out + (start + i) * dim;
      int64_t row = checked(rows, ids[start + i], hashes[i], found[i]);
      if (row < 0)
        first_values(rows, ids[start + i], to);
      else {
        const float *restrict from = (const float *)(record(rows, row) + HEADER);
        for (int64_t k = 0; k < dim; k++) to[k] = from[k];
      }
    }
  }
}

void find_all(const rows_t *rows, const uint64_t *ids, int64_t n, int64_t *found) {
  for (int64_t start = 0; start < n; start += AHEAD)
    find_some(rows, ids + start, n - start < AHEAD ? (int)(n - start) : AHEAD, found + start);
}

static void enter(rows_t *rows, uint64_t hash, int64_t row) {
  uint64_t mask = (1ull << rows->bits) - 1, at = hash >> (64 - rows->bits);
  while (rows->entries[at]) at = (at + 1) & mask;
  rows->entries[at] = hash << 32 | (uint64_t)(row + 1);
}

/* The index anew, from the records: it has grown, or they came from elsewhere. Returns 1 where an id is there twice. */
int64_t index_all(rows_t *rows) {
  uint64_t mask = (1ull << rows->bits) - 1;
  for (int64_t start = 0; start < rows->count; start += AHEAD) {
    int64_t stop = rows->count - start < AHEAD ? rows->count : start + AHEAD;
    for (int64_t row = start; row < stop; row++)
      __builtin_prefetch(rows->entries + (mix(id_of(record(rows, row))) >> (64 - rows->bits)), 1);
    for (int64_t row = start; row < stop; row++) {
      uint64_t id = id_of(record(rows, row)), hash = mix(id), at = hash >> (64 - rows->bits);
      for (; rows->entries[at]; at = (at + 1) & mask) {
        uint64_t entry = rows->entries[at];
        if ((uint32_t)(entry >> 32) == (uint32_t)hash && id_of(record(rows, (int64_t)(uint32_t)entry - 1)) == id)
          return 1;
      }
      rows->entries[at] = hash << 32 | (uint64_t)(row + 1);
    }
  }
  return 0;
}

static int64_t append(rows_t *rows, uint64_t id, uint64_t hash) {
  int64_t row = rows->count++;
  memcpy(record(rows, row), &id, 8);
  enter(rows, hash, row);
  return row;
}

/* Ids with their records, each once: a record that is there is written over. */
void put_records(rows_t *rows, const uint32_t *records, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    const uint32_t *from = records + i * rows->words;
    uint64_t id = id_of(from), hash = mix(id);
    int64_t row = find(rows, id, hash);
    if (row < 0) row = append(rows, id, hash);
    memcpy(record(rows, row), from, (size_t)rows->words * 4);
  }
}

static uint64_t position(const rows_t *rows, int64_t row) {
  uint64_t mask = (1ull << rows->bits) - 1, hash = mix(id_of(record(rows, row)));
  uint64_t at = hash >> (64 - rows->bits);
  while ((uint32_t)rows->entries[at] != (uint32_t)(row + 1)) at = (at + 1) & mask;
  return at;
}

/* The last record moves into each hole, and entries move up to theirs: there are no marks of what was removed. */
int64_t remove_rows(rows_t *rows, const uint64_t *ids, int64_t n) {
  uint64_t mask = (1ull << rows->bits) - 1;
  int64_t removed = 0;
  for (int64_t i = 0; i < n; i++) {
    int64_t row = find(rows, ids[i], mix(ids[i]));
    if (row < 0) continue;
    uint64_t hole = position(rows, row);
    rows->entries[hole] = 0;
    for (uint64_t at = (hole + 1) & mask; rows->entries[at]; at = (at + 1) & mask) {
      uint64_t home = mix(id_of(record(rows, (int64_t)(uint32_t)rows->entries[at] - 1))) >> (64 - rows->bits);
      if (((at - home) & mask) < ((at - hole) & mask)) continue; /* it lies between its home and the hole */
      rows->entries[hole] = rows->entries[at];
      rows->entries[at] = 0;
      hole = at;
    }
    int64_t last = --rows->count;
    if (row != last) {
      uint64_t at = position(rows, last);
      memcpy(record(rows, row), record(rows, last), (size_t)rows->words * 4);
      rows->entries[at] = (rows->entries[at] & ~0xffffffffull) | (uint64_t)(row + 1);
    }
    removed++;
  }
  return removed;
}

/* Marks by id: of ids that are not admitted yet (how often and when they were seen), and of rows on disk. */
static entry_t *mark_at(const marks_t *marks, uint64_t id) {
  uint64_t mask = (1ull << marks->bits) - 1, at = mix(id) >> (64 - marks->bits);
  while (marks->entries[at].mark && marks->entries[at].id != id) at = (at + 1) & mask;
  return marks->entries + at;
}

void marks_get(const marks_t *marks, const uint64_t *ids, int64_t n, uint64_t *out) {
  for (int64_t start = 0; start < n; start += AHEAD) {
    int64_t stop = n - start < AHEAD ? n : start + AHEAD;
    for (int64_t i = start; i < stop; i++) __builtin_prefetch(marks->entries + (mix(ids[i]) >> (64 - marks->bits)));
    for (int64_t i = start; i < stop; i++) out[i] = mark_at(marks, ids[i])->mark;
  }
}

void marks_put(marks_t *marks, const uint64_t *ids, const uint64_t *values, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    entry_t *entry = mark_at(marks, ids[i]);
    if (!entry->mark) marks->count++;
    entry->id = ids[i];
    entry->mark = values[i];
  }
}

static void clear(marks_t *marks, entry_t *entry) {
  uint64_t mask = (1ull << marks->bits) - 1, hole = (uint64_t)(entry - marks->entries);
  marks->entries[hole].mark = 0;
  for (uint64_t at = (hole + 1) & mask; marks->entries[at].mark; at = (at + 1) & mask) {
    uint64_t home = mix(marks->entries[at].id) >> (64 - marks->bits);
    if (((at - home) & mask) < ((at - hole) & mask)) continue;
    marks->entries[hole] = marks->entries[at];
    marks->entries[at].mark = 0;
    hole = at;
  }
  marks->count--;
}

void marks_remove(marks_t *marks, const uint64_t *ids, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    entry_t *entry = mark_at(marks, ids[i]);
    if (entry->mark) clear(marks, entry);
  }
}

int64_t marks_all(const marks_t *marks, uint64_t *ids, uint64_t *values) {
  int64_t n = 0;
  for (int64_t at = 0; at < (int64_t)1 << marks->bits; at++) {
    if (!marks->entries[at].mark) continue;
    ids[n] = marks->entries[at].id;
    values[n++] = marks->entries[at].mark;
  }
  return n;
}

/* Each id once, in the order of first occurrence; which of them each is; and how often it occurs. */
int64_t unite(const uint64_t *ids, const uint32_t *times, int64_t n, uint32_t *scratch, int64_t bits, int32_t *which,
              uint64_t *unique, uint32_t *seen) {
  uint64_t mask = (1ull << bits) - 1;
  int64_t found = 0;
  for (int64_t start = 0; start < n; start += AHEAD) {
    int64_t stop = n - start < AHEAD ? n : start + AHEAD;
    for (int64_t i = start; i < stop; i++) __builtin_prefetch(scratch + (mix(ids[i]) >> (64 - bits)), 1);
    for (int64_t i = start; i < stop; i++) {
      uint64_t at = mix(ids[i]) >> (64 - bits);
      while (scratch[at] && unique[scratch[at] - 1] != ids[i]) at = (at + 1) & mask;
      if (!scratch[at]) {
        unique[found] = ids[i];
        seen[found] = 0;
        scratch[at] = (uint32_t)++found;
      }
      uint32_t k = scratch[at] - 1, sum = seen[k] + (times ? times[i] : 1);
      seen[k] = sum < seen[k] || sum > USES_MAX ? USES_MAX : sum;
      which[i] = (int32_t)k;
    }
  }
  return found;
}

/* Gradients of the same id are added in the order in which they come. `reached`: zeros, one for each sum. */
void add_up(const float *restrict gradients, const int32_t *which, int64_t n, int64_t dim, uint8_t *reached,
            float *restrict sums) {
  for (int64_t i = 0; i < n; i++) {
    if (i + SOON < n) ask_for(sums + (int64_t)which[i + SOON] * dim, dim * 4, 1);
    const float *from = gradients + i * dim;
    float *to = sums + (int64_t)which[i] * dim;
    if (!reached[which[i]]) {
      reached[which[i]] = 1;
      memcpy(to, from, (size_t)dim * 4);
    } else
      for (int64_t k = 0; k < dim; k++) to[k] = to[k] + from[k];
  }
}

/* The row of each id, which is made where the id has been seen often enough; -1: it has not. */
void admit(rows_t *rows, marks_t *candidates, const uint64_t *ids, const uint32_t *seen, int64_t n, uint64_t threshold,
           uint64_t update, int64_t *found) {
  for (int64_t start = 0; start < n; start += AHEAD) {
    int some = n - start < AHEAD ? (int)(n - start) : AHEAD;
    find_some(rows, ids + start, some, found + start);
    for (int i = 0; i < some; i++) {
      int64_t at = start + i;
      if (found[at] >= 0) continue;
      if (threshold > 1) {
        entry_t *entry = mark_at(candidates, ids[at]);
        uint64_t times = (entry->mark & USES_MAX) + seen[at];
        if (times < threshold) {
          if (!entry->mark) candidates->count++;
          entry->id = ids[at];
          entry->mark = update << USES_BITS | times;
          continue;
        }
        if (entry->mark) clear(candidates, entry);
      }
      found[at] = append(rows, ids[at], mix(ids[at]));
      uint32_t *made = record(rows, found[at]);
      set_mark(made, update << USES_BITS);
      first_values(rows, ids[at], (float *)(made + HEADER));
      memset(made + HEADER + rows->dim, 0, (size_t)(rows->words - HEADER - rows->dim) * 4);
    }
  }
}

static inline float square_sum(const float *restrict x, int64_t dim) {
  float lanes[LANES] = {0};
  int64_t whole = dim / LANES * LANES;
  for (int64_t start = 0; start < whole; start += LANES)
    for (int k = 0; k < LANES; k++) lanes[k] = lanes[k] + x[start + k] * x[start + k];
  for (int64_t k = whole; k < dim; k++) lanes[k - whole] = lanes[k - whole] + x[k] * x[k];
  for (int half = LANES / 2; half; half /= 2)
    for (int k = 0; k < half; k++) lanes[k] = lanes[k] + lanes[k + half];
  return lanes[0];
}

static inline void step(const rule_t *rule, int64_t dim, uint64_t uses, float *restrict p, float *restrict s,
                        float *restrict g) {
  float lr = rule->lr, decay = rule->decay, eps = rule->eps;
  if (decay != 0.0f && rule->kind != ADAMW)
    for (int64_t k = 0; k < dim; k++) g[k] = g[k] + decay * p[k];
  switch (rule->kind) {
    case SGD:
      for (int64_t k = 0; k < dim; k++) p[k] = p[k] - lr * g[k];
      return;
    case ADAGRAD:
      for (int64_t k = 0; k < dim; k++) {
        s[k] = s[k] + g[k] * g[k];
        p[k] = p[k] - (lr * g[k]) / (sqrtf(s[k]) + eps);
      }
      return;
    case ROWWISE_ADAGRAD: {
      s[0] = s[0] + square_sum(g, dim) / (float)dim;
      float factor = lr / (sqrtf(s[0]) + eps);
      for (int64_t k = 0; k < dim; k++) p[k] = p[k] - factor * g[k];
      return;
    }
    default: {
      int64_t at = (int64_t)uses < rule->corrections ? (int64_t)uses : rule->corrections - 1;
      float first = rule->first, second = rule->second, rest_first = rule->rest_first, rest_second = rule->rest_second;
      float by_first = lr * rule->correction_first[at], by_second = rule->correction_second[at];
      float keep = rule->kind == ADAMW ? 1.0f - lr * decay : 1.0f;
      float *restrict m = s, *restrict v = s + dim;
      for (int64_t k = 0; k < dim; k++) {
        m[k] = first * m[k] + rest_first * g[k];
        v[k] = second * v[k] + (rest_second * g[k]) * g[k];
        p[k] = keep * p[k] - (by_first * m[k]) / (sqrtf(v[k]) * by_second + eps);
      }
    }
  }
}

/* One step of each of these rows, which are all different. `sums` is written over. */
void step_rows(rows_t *rows, const int64_t *found, int64_t n, float *sums, const rule_t *rule, uint64_t update) {
  int64_t dim = rows->dim;
  for (int64_t i = 0; i < n; i++) {
    if (i + SOON < n && found[i + SOON] >= 0) ask_for(record(rows, found[i + SOON]), rows->words * 4, 1);
    if (found[i] < 0) continue;
    uint32_t *here = record(rows, found[i]);
    uint64_t uses = mark_of(here) & USES_MAX;
    if (uses < USES_MAX) uses++;
    set_mark(here, update << USES_BITS | uses);
    float *values = (float *)(here + HEADER);
    step(rule, dim, uses, values, values + dim, sums + i * dim);
  }
}
