#include "tools/choices.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

enum { OR_MOST_STEPS = 1 << 20 };

/* Makes room for one more; returns the new memory, or null. */
static void *grown(void *at, size_t count, size_t *room, size_t width, size_t most) {
  if (count < *room) return at;
  size_t wanted = *room ? *room * 2 : 256;
  void *more = wanted > most ? NULL : realloc(at, wanted * width);
  if (more) *room = wanted;
  return more;
}

bool orTapeAdd(orTape *t, uint32_t choice) {
  void *at = grown(t->choices, t->count, &t->room, sizeof *t->choices, OR_MOST_CHOICES);
  if (!at) return false;
  t->choices = at;
  t->choices[t->count++] = choice;
  return true;
}

void orStepsAdd(orSteps *s, orScheduleStep step) {
  if (s->short_of_memory) return;
  void *at = grown(s->at, s->count, &s->room, sizeof *s->at, OR_MOST_STEPS);
  s->short_of_memory = !at;
  if (!at) return;
  s->at = at;
  s->at[s->count++] = step;
}

/* ---- text: "12:1,2": twelve times the first option, the second, the third ---- */

static bool addItem(void *tape, uint64_t firsts, uint64_t choice) {
  for (; firsts; firsts--)
    if (!orTapeAdd(tape, 0)) return false;
  return orTapeAdd(tape, (uint32_t)choice);
}

bool orTapeParse(orTape *t, const char *text) {
  t->count = 0;
  bool parsed = orTapeRead(text, addItem, t);
  if (!parsed) t->count = 0;
  return parsed;
}

/* Each choice takes at most 23 characters. Trailing first options are left out. */
char *orTapeText(const orTape *t) {
  size_t choices = 0, length = 0, firsts = 0;
  for (size_t i = 0; i < t->count; i++) choices += t->choices[i] != 0;
  size_t size = 2 + choices * 24;
  char *text = malloc(size);
  if (!text) return NULL;
  snprintf(text, size, "0");
  for (size_t i = 0; i < t->count; i++, firsts++) {
    if (!t->choices[i]) continue;
    const char *comma = length ? "," : "";
    int n = firsts ? snprintf(text + length, size - length, "%s%zu:%" PRIu32, comma, firsts,
                              t->choices[i])
                   : snprintf(text + length, size - length, "%s%" PRIu32, comma, t->choices[i]);
    length += (size_t)n;
    firsts = (size_t)-1;
  }
  return text;
}
