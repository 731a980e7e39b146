// The environment of the host: a process has one, and each who creates it gets the same one.
#pragma once

#include "ort/ort_api.h"

namespace lowbit::ort {

// Keeps it alive.
class Environment {
 public:
  // Throws Error where the host has none: one that this library had created would be gone with this object,
  // and what was registered with it, too.
  Environment();
  ~Environment() { Api().ReleaseEnv(env_); }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;

  static bool IsThere();
  OrtEnv* get() const { return env_; }

 private:
  OrtEnv* env_ = nullptr;
};

}  // namespace lowbit::ort
