#include "ort/append_provider.h"

#include <dlfcn.h>

#include <cstdlib>
#include <mutex>
#include <system_error>
#include <vector>

#include "core/status.h"
#include "ort/domain.h"
#include "ort/environment.h"

namespace lowbit::ort {
namespace {

constexpr const char* kVariable = "LOWBIT_EP";
constexpr const char* kEntry = "lowbit.ep";
constexpr std::string_view kNone = "none";
constexpr std::string_view kEach = ":*";  // behind a kind of device: each session takes the next one
constexpr std::string_view kExpected =
    "expected a device and options of the provider, such as "
    "'cuda:1,tuning=off', or 'none' for custom ops";

// The names under which the library registers itself. Hosts give it names of their own.
constexpr const char* kRegistration = "lowbit.custom_ops";
constexpr const char* kCpuRegistration = "lowbit.custom_ops.cpu";  // looks for no GPU, see ep/entry.cc

std::string Metadata(const OrtEpDevice* device, const char* key) {
  const OrtKeyValuePairs* metadata = Api().EpDevice_EpMetadata(device);
  const char* value = metadata == nullptr ? nullptr : Api().GetKeyValue(metadata, key);
  return value == nullptr ? "" : value;
}

// The devices of this provider, in all of its registrations.
class OfferedDevices {
 public:
  explicit OfferedDevices(const Environment& env) {
    const OrtEpDevice* const* devices = nullptr;
    size_t count = 0;
    Check(Api().GetEpDevices(env.get(), &devices, &count));
    for (size_t i = 0; i < count; ++i)
      if (std::string_view(Api().EpDevice_EpName(devices[i])) == kProviderName)
        devices_.push_back(devices[i]);
  }

  const OrtEpDevice* Find(const std::string& name) const {
    if (name.ends_with(kEach)) return NextOf(std::string_view(name).substr(0, name.size() - 1));
    for (const OrtEpDevice* device : devices_) {
      const std::string offered = Metadata(device, kDeviceKey);
      if (offered == name || offered == name + ":0") return device;
    }
    return nullptr;
  }
  // Whether GPUs were looked for.
  bool AreAll() const {
    for (const OrtEpDevice* device : devices_)
      if (Metadata(device, kAloneKey).empty()) return true;
    return false;
  }
  [[noreturn]] void FailWithout(const std::string& name) const {
    std::string there, reason;
    for (const OrtEpDevice* device : devices_) {
      there += (there.empty() ? "" : ", ") + Metadata(device, kDeviceKey);
      if (Metadata(device, kAloneKey).empty() && reason.empty()) reason = Metadata(device, kUnavailableKey);
    }
    Fail("device '", name, "' is not there, there is ", there, reason.empty() ? "" : "; ", reason);
  }

 private:
  // Called with the lock of AppendProvider held.
  const OrtEpDevice* NextOf(std::string_view kind) const {
    static size_t turns = 0;
    std::vector<const OrtEpDevice*> found;
    for (const OrtEpDevice* device : devices_)
      if (Metadata(device, kDeviceKey).starts_with(kind)) found.push_back(device);
    return found.empty() ? nullptr : found[turns++ % found.size()];
  }

  std::vector<const OrtEpDevice*> devices_;
};

const OrtEpDevice* FindOrRegister(const Environment& env, const std::string& name) {
  const OfferedDevices before(env);
  if (const OrtEpDevice* device = before.Find(name)) return device;
  if (before.AreAll()) before.FailWithout(name);
  const std::filesystem::path library = OwnLibrary();
  Require(!library.empty(), "the system does not tell where this library lies");
  Check(Api().RegisterExecutionProviderLibrary(env.get(), name == "cpu" ? kCpuRegistration : kRegistration,
                                               library.c_str()));
  const OfferedDevices after(env);
  const OrtEpDevice* device = after.Find(name);
  if (device == nullptr) after.FailWithout(name);
  return device;
}

bool IsDeviceName(std::string_view name) {
  const std::string_view kind = name.substr(0, name.find(':'));
  const std::string_view number = kind.size() == name.size() ? "0" : name.substr(kind.size() + 1);
  return !kind.empty() && kind.find_first_not_of("abcdefghijklmnopqrstuvwxyz") == kind.npos &&
         (number == "*" || (!number.empty() && number.find_first_not_of("0123456789") == number.npos));
}

std::string SessionEntry(const OrtSessionOptions* options, const char* key) {
  int is_there = 0;
  Check(Api().HasSessionConfigEntry(options, key, &is_there));
  if (is_there == 0) return "";
  size_t size = 0;
  Check(Api().GetSessionConfigEntry(options, key, nullptr, &size));
  std::string value(size, '\0');
  Check(Api().GetSessionConfigEntry(options, key, value.data(), &size));
  value.resize(size - 1);  // the terminating zero
  return value;
}

}  // namespace

std::optional<AskedProvider> ParseAskedProvider(std::string_view text) {
  if (text == kNone) return std::nullopt;
  AskedProvider asked;
  size_t begin = 0;
  for (bool is_first = true; begin <= text.size(); is_first = false) {
    const std::string_view part = text.substr(begin, text.find(',', begin) - begin);
    begin += part.size() + 1;
    if (is_first) {
      Require(IsDeviceName(part), "'", text, "': '", part, "' is no device; ", kExpected);
      asked.device = part;
      continue;
    }
    const size_t equals = part.find('=');
    Require(equals != part.npos && equals > 0, "'", text, "': '", part, "' is no option=value; ", kExpected);
    asked.options[std::string(part.substr(0, equals))] = part.substr(equals + 1);
  }
  return asked;
}

std::optional<AskedProvider> FindAskedProvider(const OrtSessionOptions* options) {
  std::string text = SessionEntry(options, kEntry);
  const char* source = kEntry;
  if (const char* variable = std::getenv(kVariable); text.empty() && variable != nullptr) {
    text = variable;
    source = kVariable;
  }
  if (text.empty()) return std::nullopt;
  try {
    return ParseAskedProvider(text);
  } catch (const Error& e) {
    Fail(source, " is ", e.what());
  }
}

std::string AppendProvider(OrtSessionOptions* options, const OrtApiBase* base, const AskedProvider& asked) {
  static std::mutex mutex;  // two sessions would register the library twice
  const std::lock_guard lock(mutex);
  try {
    Require(Api().GetEpApi() != nullptr, "ONNX Runtime ", base->GetVersionString(),
            " was built without plugin execution providers");
    const Environment env;
    const OrtEpDevice* device = FindOrRegister(env, asked.device);
    std::vector<const char*> keys, values;
    for (const auto& [key, value] : asked.options) {
      keys.push_back(key.c_str());
      values.push_back(value.c_str());
    }
    Check(Api().SessionOptionsAppendExecutionProvider_V2(options, env.get(), &device, 1, keys.data(),
                                                         values.data(), keys.size()));
    return "";
  } catch (const Error& e) {
    return e.what();
  }
}

std::filesystem::path OwnLibrary() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&OwnLibrary), &info) == 0 || info.dli_fname == nullptr) return {};
  std::error_code unresolved;
  const std::filesystem::path real = std::filesystem::canonical(info.dli_fname, unresolved);
  return unresolved ? std::filesystem::path(info.dli_fname) : real;
}

}  // namespace lowbit::ort
