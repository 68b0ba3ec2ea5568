// The whole client library.
#pragma once

#include "kvgrpc/client.h"
#include "kvgrpc/error.h"
#include "kvgrpc/leases.h"
#include "kvgrpc/moves.h"
#include "kvgrpc/redacted.h"
#include "kvgrpc/states.h"
#include "kvgrpc/steps.h"
#include "kvgrpc/tls.h"
#include "kvgrpc/transfers.h"
#include "kvgrpc/values.h"
#include "kvgrpc/watch.h"
