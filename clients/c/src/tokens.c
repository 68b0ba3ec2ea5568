/* Tokens by which ranks of peers ask this process for a proof, and the proofs that it keeps in its memory for them. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "connection.h"
#include "mover.h"

/* Time after the offer in which a peer may ask, in seconds. */
#define TTL_S 60.0
/* Maximum number of tokens of a peer, for concurrent and repeated handshakes. */
#define OF_A_PEER 4
#define TOKENS_MAX 4096
/* Exclusive bound of the numbers of asking ranks; an older peer states none. */
#define RANKS_END 4096u
#define RANK_BYTES 2

typedef struct proof {
  struct proof *next;
  uint8_t bytes[KV_SHA256_BYTES];
} proof;

struct kv_token {
  kv_token *next;
  kvgrpc_bytes peer;
  double ends;
  uint8_t secret[KV_TOKEN_BYTES];
  uint8_t asked[RANKS_END / 8 + 1]; /* A bit for each number under which it was asked; the last one: under none. */
  proof *proofs;
};

static void drop(kv_mover *mover, kv_token **at) {
  kv_token *token = *at;
  *at = token->next;
  mover->token_count--;
  while (token->proofs) {
    proof *next = token->proofs->next;
    free(token->proofs);
    token->proofs = next;
  }
  kv_disown(token->peer);
  free(token);
}

void kv_tokens_revoke(kv_mover *mover, const kvgrpc_bytes *peer) {
  for (kv_token **at = &mover->tokens; *at;) {
    if (!peer || kv_same((*at)->peer, *peer)) drop(mover, at);
    else at = &(*at)->next;
  }
}

/* Drops what is over, the oldest of a peer that has many, and the oldest if there are too many. */
static void make_room(kv_mover *mover, kvgrpc_bytes peer, double now) {
  size_t same = 0;
  for (const kv_token *token = mover->tokens; token; token = token->next) same += kv_same(token->peer, peer);
  for (kv_token **at = &mover->tokens; *at;) {
    const bool of_peer = kv_same((*at)->peer, peer);
    const bool over = (*at)->ends <= now || mover->token_count >= TOKENS_MAX || (of_peer && same >= OF_A_PEER);
    if (of_peer && over) same--;
    if (over) drop(mover, at);
    else at = &(*at)->next;
  }
}

const kv_token *kv_token_mint(kv_mover *mover, kvgrpc_bytes peer) {
  const double now = kv_now();
  make_room(mover, peer, now);
  kv_token *token = calloc(1, sizeof *token), **at = &mover->tokens;
  if (!token) return NULL;
  token->peer = kv_own(peer);
  token->ends = now + TTL_S;
  if (!token->peer.data || !kv_random(token->secret, sizeof token->secret)) {
    kv_disown(token->peer);
    free(token);
    return NULL;
  }
  while (*at) at = &(*at)->next;
  *at = token;
  mover->token_count++;
  return token;
}

const uint8_t *kv_token_secret(const kv_token *token) { return token->secret; }

static size_t refused(uint8_t reply[KV_REPLY_BYTES], const char *why) {
  reply[0] = 1;
  return 1 + (size_t)snprintf((char *)reply + 1, KV_REPLY_BYTES - 1, "%.200s", why);
}

static void put_address(uint8_t *into, uint64_t address) {
  for (size_t i = 0; i < 8; i++) into[i] = (uint8_t)(address >> (8 * i));
}

static kv_token *token_of(kv_mover *mover, const uint8_t *secret) {
  kv_token *found = NULL;
  for (kv_token *token = mover->tokens; token; token = token->next)
    if (kv_equal(token->secret, secret, KV_TOKEN_BYTES)) found = token;
  return found && found->ends > kv_now() ? found : NULL;
}

size_t kv_token_answer(kv_mover *mover, const uint8_t *question, size_t size, pid_t pid,
                       uint8_t reply[KV_REPLY_BYTES]) {
  static const char unknown[] = "the token is unknown, used or expired";
  const size_t bare = KV_TOKEN_BYTES + KV_CHALLENGE_BYTES;
  uint32_t rank = RANKS_END;
  if (size != bare && size != bare + RANK_BYTES) return refused(reply, unknown);
  if (size > bare) rank = (uint32_t)question[bare] << 8 | question[bare + 1];
  kv_token *token = token_of(mover, question);
  if (!token || (size > bare && rank >= RANKS_END) || token->asked[rank / 8] & 1u << rank % 8)
    return refused(reply, unknown);
  token->asked[rank / 8] |= (uint8_t)(1u << rank % 8);
  const int number = kv_admit_reader(pid);
  if (number) return refused(reply, strerror(number));
  proof *made = malloc(sizeof *made);
  if (!made) return refused(reply, "this process has no memory left");
  const uint64_t nonce_address = (uint64_t)(uintptr_t)mover->nonce;
  kv_proof(question + KV_TOKEN_BYTES, nonce_address, mover->nonce, mover->offered, made->bytes);
  made->next = token->proofs;
  token->proofs = made;
  reply[0] = 0;
  put_address(reply + 1, (uint64_t)(uintptr_t)made->bytes);
  put_address(reply + 9, nonce_address);
  return 17;
}
