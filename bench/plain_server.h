#pragma once

namespace kvtier::bench {

// Serves what a plain gRPC stream costs and nothing else: Append throws chunks away and
// acknowledges them, Read sends bytes that are ready. The same messages as kvtierd, so that what
// kvtierd takes longer is its own. Writes its address to `ready_file` and serves until killed.
int RunPlainServer(const char* ready_file);

}  // namespace kvtier::bench
