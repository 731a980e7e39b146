#include "ep/ort/factory.h"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <utility>
#include <vector>

#include "core/status.h"
#include "ep/ort/allocator.h"
#include "ep/ort/data_transfer.h"
#include "ep/ort/memcpy_kernels.h"
#include "ep/ort/resource_importer.h"
#include "ep/ort/stream.h"
#include "ep/region/compiled_model.h"
#include "ort/domain.h"

namespace lowbit::ep {
namespace {

// Of an OrtEpDevice's metadata, as the keys in ort/domain.h.
constexpr const char* kDescriptionKey = "description";

using ort::kAloneKey;
using ort::kDeviceKey;
using ort::kUnavailableKey;

struct OfferedDevice {
  std::string name, description;
  std::shared_ptr<Device> device;  // null: the CPU
  KernelRegistry registry;
  CreateBackend create_backend;
  const OrtHardwareDevice* hardware = nullptr;  // under which it was offered last
};

constexpr uint32_t kNvidia = 0x10de;  // PCI vendor id

using Hardware = std::vector<const OrtHardwareDevice*>;

struct ReleaseEpDevice {
  void operator()(OrtEpDevice* p) const { EpApi().ReleaseEpDevice(p); }
};

Owned<OrtKeyValuePairs> Pairs(const std::vector<std::pair<const char*, std::string>>& entries) {
  OrtKeyValuePairs* pairs = nullptr;
  Api().CreateKeyValuePairs(&pairs);
  for (const auto& [key, value] : entries) Api().AddKeyValuePair(pairs, key, value.c_str());
  return Owned<OrtKeyValuePairs>(pairs);
}

// "0000:0a:00.0" and "0A:00.0" are one address.
bool SamePciAddress(std::string_view a, std::string_view b) {
  if (a.size() < b.size()) std::swap(a, b);
  if (b.empty()) return false;
  a.remove_prefix(a.size() - b.size());
  return std::equal(a.begin(), a.end(), b.begin(),
                    [](unsigned char x, unsigned char y) { return std::tolower(x) == std::tolower(y); });
}

std::string_view PciAddress(const OrtHardwareDevice* hardware) {
  const OrtKeyValuePairs* metadata = Api().HardwareDevice_Metadata(hardware);
  const char* address = metadata == nullptr ? nullptr : Api().GetKeyValue(metadata, "pci_bus_id");
  return address == nullptr ? "" : address;
}

const OrtHardwareDevice* FirstCpu(const Hardware& hardware) {
  const auto found = std::find_if(hardware.begin(), hardware.end(), [](const OrtHardwareDevice* device) {
    return Api().HardwareDevice_Type(device) == OrtHardwareDeviceType_CPU;
  });
  return found == hardware.end() ? nullptr : *found;
}

// The GPU that ONNX Runtime lists for a device of the runtime. Some machines show none (no /sys/class/drm, no
// PCI display class), or no address with it: then the next one of the vendor that is not taken, then the CPU
// stands for it.
const OrtHardwareDevice* HardwareFor(const DeviceRuntime& runtime, int index, const Hardware& hardware,
                                     const Hardware& taken) {
  const std::string address = runtime.PciBusId(index);
  const OrtHardwareDevice* nameless = nullptr;
  for (const OrtHardwareDevice* device : hardware) {
    if (Api().HardwareDevice_Type(device) != OrtHardwareDeviceType_GPU) continue;
    if (Api().HardwareDevice_VendorId(device) != runtime.VendorId()) continue;
    const std::string_view its_address = PciAddress(device);
    if (SamePciAddress(its_address, address)) return device;
    const bool is_free = std::find(taken.begin(), taken.end(), device) == taken.end();
    if (nameless == nullptr && is_free && (its_address.empty() || address.empty())) nameless = device;
  }
  return nameless != nullptr ? nameless : FirstCpu(hardware);
}

class Factory final : public OrtEpFactory {
 public:
  Factory(std::shared_ptr<DeviceRuntime> runtime, const OrtLogger* logger, OrtCustomOpDomain* domain);
  Factory(std::vector<HostDevice> hosts, bool is_alone, NoGpu unavailable, OrtEpFactory* gpus,
          const OrtLogger* logger, OrtCustomOpDomain* domain);

 private:
  void Fill();
  void FillDeviceEntries();
  size_t Offer(const Hardware& hardware, OrtEpDevice** out, size_t room);
  OrtEpDevice* CreateEpDevice(OfferedDevice& offered, const OrtHardwareDevice* hardware);
  OfferedDevice& Chosen(const OrtKeyValuePairs* const* metadata, size_t count);
  OfferedDevice* OwnerOf(const OrtMemoryDevice* memory);
  void Judge(const OrtHardwareDevice* hardware, OrtDeviceEpIncompatibilityDetails* details) const;
  OrtCompiledModelCompatibility Validate(const Hardware& hardware, std::string_view fingerprint);

  const std::shared_ptr<DeviceRuntime> runtime_;  // null: the CPU
  const Logger logger_;
  OrtCustomOpDomain* const domain_;
  const bool is_alone_ = false;
  const NoGpu unavailable_;
  OrtEpFactory* const gpus_ = nullptr;  // that stands beside this one
  std::vector<OfferedDevice> offered_;
};

Factory& Self(OrtEpFactory* factory) { return *static_cast<Factory*>(factory); }

Factory::Factory(std::shared_ptr<DeviceRuntime> runtime, const OrtLogger* logger, OrtCustomOpDomain* domain)
    : OrtEpFactory{},
      runtime_(std::move(runtime)),
      logger_(logger),
      domain_(domain),
      unavailable_{runtime_->WhyNone(), OrtDeviceEpIncompatibility_DEVICE_INCOMPATIBLE} {
  Require(runtime_->Count() > 0, "no ", runtime_->Kind(), " device can be used: ", unavailable_.text);
  for (int i = 0; i < runtime_->Count(); ++i) {
    auto device = std::make_shared<Device>(runtime_, i);
    KernelRegistry registry = CreateMemcpyRegistry(*device);
    offered_.push_back(
        {std::string(runtime_->Kind()) + ":" + std::to_string(i), runtime_->Describe(i), std::move(device),
         std::move(registry),
         [runtime = runtime_, i](const EpOptions& options) { return runtime->CreateBackend(i, options); }});
  }
  Fill();
  FillDeviceEntries();
}

Factory::Factory(std::vector<HostDevice> hosts, bool is_alone, NoGpu unavailable, OrtEpFactory* gpus,
                 const OrtLogger* logger, OrtCustomOpDomain* domain)
    : OrtEpFactory{},
      logger_(logger),
      domain_(domain),
      is_alone_(is_alone),
      unavailable_(std::move(unavailable)),
      gpus_(gpus) {
  for (HostDevice& host : hosts) {
    offered_.push_back({std::move(host.name), std::move(host.description), nullptr, nullptr,
                        std::move(host.create_backend)});
  }
  Fill();
}

OrtEpDevice* Factory::CreateEpDevice(OfferedDevice& offered, const OrtHardwareDevice* hardware) {
  // ONNX Runtime adds "version" itself.
  const Owned<OrtKeyValuePairs> metadata =
      Pairs({{kDeviceKey, offered.name}, {kDescriptionKey, offered.description}});
  if (!unavailable_.text.empty())
    Api().AddKeyValuePair(metadata.get(), kUnavailableKey, unavailable_.text.c_str());
  if (is_alone_) Api().AddKeyValuePair(metadata.get(), kAloneKey, "1");
  const Owned<OrtKeyValuePairs> options = Pairs({{ort::kBringsOps, "1"}});
  OrtEpDevice* made = nullptr;
  Check(EpApi().CreateEpDevice(this, hardware, metadata.get(), options.get(), &made));
  std::unique_ptr<OrtEpDevice, ReleaseEpDevice> device(made);
  if (offered.device != nullptr)
    Check(EpApi().EpDevice_AddAllocatorInfo(made, offered.device->memory_info()));
  offered.hardware = hardware;
  return device.release();
}

size_t Factory::Offer(const Hardware& hardware, OrtEpDevice** out, size_t room) {
  Hardware taken;
  size_t count = 0;
  for (OfferedDevice& offered : offered_) {
    const OrtHardwareDevice* found = runtime_ == nullptr
                                         ? FirstCpu(hardware)
                                         : HardwareFor(*runtime_, offered.device->index(), hardware, taken);
    if (found == nullptr) continue;
    if (count == room) {
      logger_.Warning("lowbit: " + offered.name + " is not offered: ONNX Runtime takes " +
                      std::to_string(room) + " devices of a provider");
      break;
    }
    out[count++] = CreateEpDevice(offered, found);
    taken.push_back(found);
  }
  return count;
}

// Several devices may stand behind one hardware device, so their name decides.
OfferedDevice& Factory::Chosen(const OrtKeyValuePairs* const* metadata, size_t count) {
  Require(count == 1, "a session runs on one device of ", kProviderName, ", it was given ", count);
  const char* name = metadata[0] == nullptr ? nullptr : Api().GetKeyValue(metadata[0], kDeviceKey);
  const auto found = std::find_if(offered_.begin(), offered_.end(), [&](const OfferedDevice& offered) {
    return name != nullptr && offered.name == name;
  });
  Require(found != offered_.end(), "the session was given a device named '", name == nullptr ? "" : name,
          "', which is not among those of ", kProviderName);
  return *found;
}

OfferedDevice* Factory::OwnerOf(const OrtMemoryDevice* memory) {
  const auto found = std::find_if(offered_.begin(), offered_.end(), [&](const OfferedDevice& offered) {
    return offered.device != nullptr && offered.device->Owns(memory);
  });
  return found == offered_.end() ? nullptr : &*found;
}

OrtCompiledModelCompatibility Factory::Validate(const Hardware& hardware, std::string_view fingerprint) {
  for (const OfferedDevice& offered : offered_) {
    if (std::find(hardware.begin(), hardware.end(), offered.hardware) == hardware.end()) continue;
    const std::string why_unfit = WhyUnfit(fingerprint, offered.create_backend(EpOptions{})->Fingerprint());
    if (why_unfit.empty()) return OrtCompiledModelCompatibility_EP_SUPPORTED_OPTIMAL;
    logger_.Warning("lowbit: " + why_unfit);
  }
  return OrtCompiledModelCompatibility_EP_UNSUPPORTED;
}

void Factory::Judge(const OrtHardwareDevice* hardware, OrtDeviceEpIncompatibilityDetails* details) const {
  const OrtHardwareDeviceType type = Api().HardwareDevice_Type(hardware);
  if (type == OrtHardwareDeviceType_CPU) return;
  if (gpus_ != nullptr)
    return Check(gpus_->GetHardwareDeviceIncompatibilityDetails(gpus_, hardware, details));
  const auto refuse = [&](OrtDeviceEpIncompatibilityReason reason, const std::string& notes) {
    Check(EpApi().DeviceEpIncompatibilityDetails_SetDetails(details, static_cast<uint32_t>(reason), 0,
                                                            notes.c_str()));
  };
  const uint32_t vendor = runtime_ == nullptr ? kNvidia : runtime_->VendorId();
  if (type != OrtHardwareDeviceType_GPU || Api().HardwareDevice_VendorId(hardware) != vendor) {
    refuse(OrtDeviceEpIncompatibility_DEVICE_INCOMPATIBLE,
           "lowbit runs on CPUs, and on NVIDIA GPUs from compute capability 7.5 on");
    return;
  }
  const bool is_offered = std::any_of(offered_.begin(), offered_.end(), [&](const OfferedDevice& offered) {
    return offered.hardware == hardware;
  });
  if (!is_offered && !unavailable_.text.empty()) refuse(unavailable_.reason, unavailable_.text);
}

void Factory::Fill() {
  ort_version_supported = ort::RuntimeApiVersion();
  GetName = [](const OrtEpFactory*) noexcept { return kProviderName; };
  GetVendor = [](const OrtEpFactory*) noexcept { return kVendorName; };
  GetVersion = [](const OrtEpFactory*) noexcept { return LOWBIT_VERSION; };
  GetVendorId = [](const OrtEpFactory* factory) noexcept -> uint32_t {
    const Factory& self = *static_cast<const Factory*>(factory);
    return self.runtime_ == nullptr ? 0 : self.runtime_->VendorId();
  };
  GetSupportedDevices = [](OrtEpFactory* factory, const OrtHardwareDevice* const* hardware, size_t count,
                           OrtEpDevice** devices, size_t room, size_t* offered) noexcept {
    *offered = 0;
    return Guarded([&] { *offered = Self(factory).Offer({hardware, hardware + count}, devices, room); });
  };
  CreateEp = [](OrtEpFactory* factory, const OrtHardwareDevice* const*,
                const OrtKeyValuePairs* const* metadata, size_t count, const OrtSessionOptions* session,
                const OrtLogger* logger, OrtEp** ep) noexcept {
    *ep = nullptr;
    return Guarded([&] {
      const OfferedDevice& chosen = Self(factory).Chosen(metadata, count);
      *ep = std::make_unique<Provider>(chosen.create_backend, chosen.device, chosen.registry.get(), session,
                                       Logger(logger))
                .release();
    });
  };
  ReleaseEp = [](OrtEpFactory*, OrtEp* ep) noexcept { delete static_cast<Provider*>(ep); };
  ValidateCompiledModelCompatibilityInfo = [](OrtEpFactory* factory, const OrtHardwareDevice* const* hardware,
                                              size_t count, const char* fingerprint,
                                              OrtCompiledModelCompatibility* compatibility) noexcept {
    return Guarded(
        [&] { *compatibility = Self(factory).Validate({hardware, hardware + count}, fingerprint); });
  };
  GetHardwareDeviceIncompatibilityDetails = [](OrtEpFactory* factory, const OrtHardwareDevice* hardware,
                                               OrtDeviceEpIncompatibilityDetails* details) noexcept {
    return Guarded([&] { Self(factory).Judge(hardware, details); });
  };
  GetNumCustomOpDomains = [](OrtEpFactory*, size_t* count) noexcept -> OrtStatus* {
    *count = 1;
    return nullptr;
  };
  GetCustomOpDomains = [](OrtEpFactory* factory, OrtCustomOpDomain** domains,
                          size_t count) noexcept -> OrtStatus* {
    if (count != 0) domains[0] = Self(factory).domain_;
    return nullptr;
  };
  // ONNX Runtime calls these of every factory; the CPU has nothing to offer.
  IsStreamAware = [](const OrtEpFactory* factory) noexcept {
    return static_cast<const Factory*>(factory)->runtime_ != nullptr;
  };
  CreateAllocator = [](OrtEpFactory*, const OrtMemoryInfo*, const OrtKeyValuePairs*,
                       OrtAllocator** allocator) noexcept -> OrtStatus* {
    *allocator = nullptr;
    return nullptr;
  };
  ReleaseAllocator = [](OrtEpFactory*, OrtAllocator* allocator) noexcept {
    if (allocator != nullptr) ReleaseDeviceAllocator(allocator);
  };
  CreateDataTransfer = [](OrtEpFactory*, OrtDataTransferImpl** transfer) noexcept -> OrtStatus* {
    *transfer = nullptr;
    return nullptr;
  };
}

void Factory::FillDeviceEntries() {
  CreateAllocator = [](OrtEpFactory* factory, const OrtMemoryInfo* info, const OrtKeyValuePairs*,
                       OrtAllocator** allocator) noexcept {
    return Guarded([&] {
      OfferedDevice* owner = Self(factory).OwnerOf(EpApi().MemoryInfo_GetMemoryDevice(info));
      Require(owner != nullptr, "an allocator was asked for memory that is none of the provider's devices'");
      *allocator = CreateDeviceAllocator(*owner->device, Self(factory).logger_);
    });
  };
  CreateDataTransfer = [](OrtEpFactory* factory, OrtDataTransferImpl** transfer) noexcept {
    return Guarded([&] {
      std::vector<std::shared_ptr<Device>> devices;
      for (const OfferedDevice& offered : Self(factory).offered_) devices.push_back(offered.device);
      *transfer = CreateDeviceTransfer(std::move(devices));
    });
  };
  CreateExternalResourceImporterForDevice = [](OrtEpFactory* factory, const OrtEpDevice* ep_device,
                                               OrtExternalResourceImporterImpl** importer) noexcept {
    *importer = nullptr;
    return Guarded([&] {
      const OrtKeyValuePairs* const metadata = Api().EpDevice_EpMetadata(ep_device);
      *importer = CreateResourceImporter(Self(factory).Chosen(&metadata, 1).device, ep_device);
    });
  };
  CreateSyncStreamForDevice = [](OrtEpFactory* factory, const OrtMemoryDevice* memory,
                                 const OrtKeyValuePairs*, OrtSyncStreamImpl** stream) noexcept {
    return Guarded([&] {
      OfferedDevice* owner = Self(factory).OwnerOf(memory);
      Require(owner != nullptr, "a stream was asked for a device that is none of the provider's");
      *stream = CreateDeviceStream(*owner->device, nullptr);
    });
  };
}

}  // namespace

OrtStatus* CreateDeviceFactory(const OrtApiBase* base, const OrtLogger* logger, OrtCustomOpDomain* domain,
                               std::shared_ptr<DeviceRuntime> runtime, OrtEpFactory** out) noexcept {
  if (OrtStatus* refused = ort::Attach(base)) return refused;
  return Guarded([&] { *out = std::make_unique<Factory>(std::move(runtime), logger, domain).release(); });
}

OrtStatus* CreateHostFactory(const OrtLogger* logger, OrtCustomOpDomain* domain,
                             std::vector<HostDevice> hosts, bool is_alone, NoGpu unavailable,
                             OrtEpFactory* gpus, OrtEpFactory** out) noexcept {
  return Guarded([&] {
    *out = std::make_unique<Factory>(std::move(hosts), is_alone, std::move(unavailable), gpus, logger, domain)
               .release();
  });
}

void ReleaseFactory(OrtEpFactory* factory) noexcept { delete static_cast<Factory*>(factory); }

}  // namespace lowbit::ep
