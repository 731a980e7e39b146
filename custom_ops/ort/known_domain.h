#pragma once

namespace lowbit::ort {

// Has ONNX Runtime enter the domain of the ops into its table, once in a process, by a session that is released at
// once. Left alone it does so when the first session is created, without a lock: of two that are created at the same
// time one may fail ("the domain is already exist"; 5 of 300 pairs). Does nothing, and is asked again, where the host
// has no environment yet. Throws Error.
void MakeDomainKnown();

}  // namespace lowbit::ort
