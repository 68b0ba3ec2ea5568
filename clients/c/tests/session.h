/* An engine whose lead is the test itself, at the other end of a socket: no thread, and frames at once. */
#ifndef SESSION_H
#define SESSION_H

#include "lying_lead.h"

/* Makes an engine that is attached to `lead`, whose listener it leaves alone. */
kvgrpc_engine *session_open(lying_lead *lead);
/* Writes one event with a number into a frame, and its kind; `session_say` sends the frame. */
size_t session_event(kv_writer *frame, uint64_t number, size_t marks[2], uint32_t kind);
void session_say(lying_lead *lead, kv_writer *frame, size_t marks[2], size_t kind);
/* Says that the call about `transfer` named it `id`, in the field of its reply. */
void session_name(lying_lead *lead, uint64_t number, kvgrpc_transfer transfer, uint32_t reply, const char *id);

#endif
