/*
 * Whether a free says nothing about the program: an exception on its way out makes it, or the end
 * of the interpreter. The sanitizer does not judge such a free.
 *
 * An exception of Python keeps the frames that it has left until it is handled, and the variables
 * of these frames are freed with the frames. So while the sanitizer is on, the functions that free
 * frames are replaced by some that count, for each thread.
 */
#pragma once

namespace torch_openreg {

/* Requires the GIL. */
void followUnwinding(bool follow);

/* Any thread. */
bool unwinds();

}  // namespace torch_openreg
