/*
 * What the C++ of a kernel's trace includes: it tells each access to a Record, and reads no memory
 * but copies on the host of numbers that addresses depend on.
 */
#pragma once
#include "kernel.h"
#include "record.h"

/* Bits of a word in `writer`, beside the program's number; MANY stands for several programs. */
static constexpr uint32_t ATOMIC = 0x80000000u, LOADED = 0x40000000u, MANY = 0x3fffffffu;

static COLD void out_of_bounds(Record *record, int kind, int argument, int site, int64_t offset) {
  if (record->bad++ == 0) record->first_bad = {offset, argument, site, kind, 0, record->program, 0};
}

static COLD void race(Record *record, int kind, int argument, int site, int64_t word) {
  const Shadow &tensor = record->tensors[argument];
  const uint32_t me = static_cast<uint32_t>(record->program) + 1;
  const uint32_t reader = tensor.reader[word], writer = tensor.writer[word] & MANY;
  const uint32_t other = kind != READS && reader != 0 && reader != me ? reader : writer;
  const Wanted &wanted = record->wanted;
  if (wanted.only >= 0 && wanted.only != record->program) return;
  if (wanted.except == record->program || (wanted.kinds >> kind & 1) == 0) return;
  if (wanted.word != nullptr && wanted.word != tensor.writer + word) return;
  if (record->races++ == 0) {
    record->first_race = {word << tensor.shift,
                          argument,
                          site,
                          kind,
                          0,
                          record->program,
                          other == MANY ? -1 : static_cast<int64_t>(other) - 1};
  }
}

/* The program in `writer` once `me` has written there, too. */
static inline uint32_t also_by(uint32_t writer, uint32_t me) {
  return ((writer & MANY) == 0) | ((writer & MANY) == me) ? me : MANY;
}

template <int KIND>
static inline bool conflicts(uint32_t writer, uint32_t reader, uint32_t me) {
  if (KIND == READS) return (writer != 0) & ((writer & MANY) != me);
  const bool read = (reader != 0) & (reader != me);
  if (KIND == WRITES) return read | ((writer != 0) & ((writer & MANY) != me));
  return read | ((writer != 0) & ((writer & ATOMIC) == 0) & (writer != me));
}

/* Words [first, last] of a tensor, which the current program accesses. */
template <int KIND>
static inline void touch_words(Record *record, int argument, int site, int64_t first,
                               int64_t last) {
  const Shadow &tensor = record->tensors[argument];
  const uint32_t me = static_cast<uint32_t>(record->program) + 1;
  uint32_t *__restrict writer = tensor.writer, *__restrict reader = tensor.reader;
  uint32_t found = 0;
  for (int64_t k = first; k <= last; ++k) found |= conflicts<KIND>(writer[k], reader[k], me);
  if (__builtin_expect(found, 0)) {
    for (int64_t k = first; k <= last; ++k) {
      if (conflicts<KIND>(writer[k], reader[k], me)) race(record, KIND, argument, site, k);
    }
  }
  for (int64_t k = first; k <= last; ++k) {
    /* What a program has written itself, it may read. */
    if (KIND == READS && writer[k] != me) {
      reader[k] = reader[k] != 0 && reader[k] != me ? MANY : me;
    }
    if (KIND == WRITES) writer[k] = me;
    /* Of several programs, none may access the word without atomics, not even the last one. */
    const uint32_t atomic = also_by(writer[k], me) | ATOMIC;
    if (KIND == UPDATES) writer[k] = writer[k] == me ? me : atomic | LOADED;
    if (KIND == STORES) writer[k] = writer[k] == me ? me : atomic | (writer[k] & LOADED);
  }
}

/* The memory that an address lies in, as a place among `tensors`, or -1. */
static int argument_at(Record *record, const char *address) {
  for (int64_t i = 0; i < record->count; ++i) {
    const Shadow &tensor = record->tensors[i];
    if (address >= tensor.begin && address < tensor.begin + tensor.bytes)
      return static_cast<int>(i);
  }
  return static_cast<int>(record->find(record, address));
}

template <int KIND, class T>
static inline void touch(Record *record, int argument, int site, const T *pointer) {
  const char *address = reinterpret_cast<const char *>(pointer);
  if (argument < 0) argument = argument_at(record, address);
  if (argument < 0)
    return out_of_bounds(record, KIND, -1, site, reinterpret_cast<int64_t>(address));
  const Shadow &tensor = record->tensors[argument];
  const int64_t offset = address - tensor.begin, size = sizeof(T);
  if (__builtin_expect(offset < 0 || offset > tensor.bytes - size, 0)) {
    return out_of_bounds(record, KIND, argument, site, offset);
  }
  touch_words<KIND>(record, argument, site, offset >> tensor.shift,
                    (offset + size - 1) >> tensor.shift);
}

/* Elements [from, to) of a row. */
template <int KIND, class T>
static inline void touch_row(Record *record, int argument, int site, const T *row, int64_t stride,
                             int64_t from, int64_t to) {
  if (from >= to) return;
  if (stride == 1 && argument >= 0) {
    const Shadow &tensor = record->tensors[argument];
    const int64_t begin = reinterpret_cast<const char *>(row + from) - tensor.begin;
    const int64_t end = reinterpret_cast<const char *>(row + to) - tensor.begin;
    if (__builtin_expect(begin >= 0 && end <= tensor.bytes, 1)) {
      return touch_words<KIND>(record, argument, site, begin >> tensor.shift,
                               (end - 1) >> tensor.shift);
    }
  }
  for (int64_t i = from; i < to; ++i) touch<KIND>(record, argument, site, row + i * stride);
}

/* The number that a load gives, from a copy on the host; without one, 0 and a blind site. */
template <class T>
static inline T peek(Record *record, int argument, int site, const T *pointer) {
  const char *address = reinterpret_cast<const char *>(pointer);
  if (argument < 0) argument = argument_at(record, address);
  if (argument >= 0) {
    const Shadow &tensor = record->tensors[argument];
    const int64_t offset = address - tensor.begin;
    if (offset < 0 || offset > tensor.bytes - static_cast<int64_t>(sizeof(T))) return T(0);
    if (tensor.host != nullptr) {
      T value;
      memcpy(static_cast<void *>(&value), tensor.host + offset, sizeof value);
      return value;
    }
  }
  record->blind[site] = 1;
  return T(0);
}
