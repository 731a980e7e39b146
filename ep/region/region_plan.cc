#include "ep/region/region_plan.h"

#include <algorithm>
#include <array>
#include <map>
#include <sstream>
#include <utility>

#include "core/node_reader.h"
#include "core/plan_output.h"
#include "core/status.h"
#include "ep/region/channels_last.h"
#include "ep/region/memory_plan.h"
#include "ep/region/planes.h"

namespace lowbit::ep {
namespace {

size_t BytesOf(const TensorShape& tensor) {
  const int64_t size = static_cast<int64_t>(ElementSize(tensor.type));
  return static_cast<size_t>(CheckedProduct(ElementCount(tensor.dims), size, "the bytes of a tensor"));
}

// Of the tensors that a region is fed, which is what a step may expect of any.
constexpr size_t kFedAlignment = 16;

// The offset in elements where what `ranges` take of x lies in one piece.
std::optional<int64_t> OffsetOfPiece(const std::vector<SliceRange>& ranges, std::span<const int64_t> x) {
  int64_t offset = 0, stride = 1;
  bool is_cut = false;  // by a dim further inside
  for (size_t i = x.size(); i-- > 0;) {
    const SliceRange& range = ranges[i];
    if (range.count != 1 && (is_cut || range.step != 1)) return std::nullopt;
    is_cut = is_cut || range.count != x[i];
    offset += range.begin * stride;
    stride *= x[i];
  }
  return offset;
}

class Planner {
 public:
  Planner(std::shared_ptr<const CompiledRegion> region, std::span<const TensorShape> inputs)
      : region_(std::move(region)),
        shapes_(region_->values),
        storage_(region_->values),
        offsets_(region_->values),
        leaves_(region_->values),
        homes_(region_->values),
        lifetime_of_(region_->values),
        planes_(region_->values),
        channels_last_(region_->values),
        is_turned_(region_->values),
        stores_(region_->ops.size()),
        is_moved_(region_->ops.size()) {
    Require(inputs.size() == region_->inputs.size(), "the region has ", region_->inputs.size(),
            " inputs, got shapes of ", inputs.size());
    plan_.inputs.assign(inputs.begin(), inputs.end());
    for (const CompiledRegion::Output& output : region_->outputs) leaves_[At(output.value)] = true;
    for (size_t i = region_->ops.size(); i-- > 0;) {
      const CompiledRegion::Op& op = region_->ops[i];
      if (op.reshape && leaves_[At(op.output)]) leaves_[At(op.fed[0])] = true;
    }
  }

  RegionPlan Make(PlaneUse planes) {
    PlaceGiven();
    InferShapes();
    PlaceOutputs();
    FindStores();
    FindForms(planes);
    AddSteps();
    PutBlocksTogether();
    AddCopies();
    PlaceWorkspace();
    plan_.owner = region_;
    return std::move(plan_);
  }

 private:
  static size_t At(ValueId id) { return static_cast<size_t>(id); }

  // The value in whose memory `id` lies: itself, unless reshapes made it of another, or it is a piece of one.
  size_t Root(ValueId id) const { return At(storage_[At(id)]); }

  void Describe(ValueId id, const TensorShape& shape, ValueId storage, size_t offset = 0) {
    BytesOf(shape);
    shapes_[At(id)] = shape;
    storage_[At(id)] = storage;
    offsets_[At(id)] = offset;
  }

  bool IsPiece(ValueId id) const { return Root(id) != At(id); }  // of the output of a step

  // Where in the memory of its input the output of `op` lies, if it is a piece of a tensor of the workspace.
  std::optional<size_t> PieceOffset(const CompiledRegion::Op& op, const TensorShape& x) const {
    if (!op.cut || leaves_[At(op.output)]) return std::nullopt;
    const size_t root = Root(op.fed[0]);
    if (homes_[root] || leaves_[root]) return std::nullopt;
    const std::optional<int64_t> elements = OffsetOfPiece(op.cut(x.dims), x.dims);
    if (!elements) return std::nullopt;
    const size_t offset = offsets_[At(op.fed[0])] + static_cast<size_t>(*elements) * ElementSize(x.type);
    return offset % kFedAlignment == 0 ? std::optional(offset) : std::nullopt;
  }

  // What is there before the first step. An initializer that is an input as well counts as an initializer.
  void PlaceGiven() {
    for (const auto& [id, shape] : region_->described) Describe(id, shape, id);
    for (size_t i = 0; i < region_->inputs.size(); ++i) {
      const ValueId id = region_->inputs[i];
      Describe(id, plan_.inputs[i], id);
      homes_[At(id)] = Location{Location::Kind::kExternal, i};
    }
    for (const CompiledRegion::Constant& constant : region_->constants) {
      Describe(constant.value, constant.shape, constant.value);
      homes_[At(constant.value)] = Location{Location::Kind::kConstant, plan_.constants.size()};
      plan_.constants.push_back(constant.data);
    }
  }

  std::vector<TensorShape> FedShapes(const CompiledRegion::Op& op) const {
    std::vector<TensorShape> fed;
    fed.reserve(op.fed.size());
    for (const ValueId id : op.fed) fed.push_back(shapes_[At(id)]);
    return fed;
  }

  void InferShapes() {
    for (const CompiledRegion::Op& op : region_->ops) {
      try {
        const std::vector<TensorShape> fed = FedShapes(op);
        if (op.reshape) {
          Describe(op.output, OutputOf(StandardNode(*op.reshape), fed), storage_[At(op.fed[0])],
                   offsets_[At(op.fed[0])]);
          continue;
        }
        const TensorShape y = op.step != nullptr ? op.step->Output(fed) : op.shape(fed);
        Require(!op.output_type || y.type == *op.output_type, "the graph declares an output of type ",
                TypeName(op.output_type.value_or(y.type)), ", the node makes ", TypeName(y.type));
        const std::optional<size_t> offset = op.step != nullptr ? PieceOffset(op, fed[0]) : std::nullopt;
        Describe(op.output, y, offset ? storage_[At(op.fed[0])] : op.output, offset.value_or(0));
      } catch (const Error& e) {
        Fail(op.name, ": ", e.what());
      }
    }
  }

  // A tensor that leaves the region is written where the caller wants it. One that lies elsewhere already (an
  // input, a constant, another output under other dims) is copied at the end.
  void PlaceOutputs() {
    for (size_t o = 0; o < region_->outputs.size(); ++o) {
      const CompiledRegion::Output& output = region_->outputs[o];
      const TensorShape& shape = shapes_[At(output.value)];
      Require(output.type == shape.type, "output '", output.name, "' of the region has element type ",
              TypeName(shape.type), ", the model declares ",
              output.type ? TypeName(*output.type) : "one that no lowbit op makes");
      plan_.outputs.push_back(shape);
      std::optional<Location>& home = homes_[Root(output.value)];
      if (home) {
        copied_.push_back(o);
      } else {
        home = OutputLocation(o);
      }
    }
  }

  Location OutputLocation(size_t o) const { return {Location::Kind::kExternal, plan_.inputs.size() + o}; }

  // Where a tensor of the step that is added now lies. Offsets in the workspace are known later: until then
  // `at` is the index of a lifetime.
  Location Use(ValueId id) {
    const size_t root = Root(id);
    if (homes_[root]) return *homes_[root];
    const int now = static_cast<int>(plan_.steps.size());
    std::optional<size_t>& index = lifetime_of_[root];
    if (!index) {
      index = lifetimes_.size();
      lifetimes_.push_back({BytesAt(root), now, now});
    }
    lifetimes_[*index].last = now;
    return {Location::Kind::kWorkspace, *index, planes_[root],
            channels_last_[root] ? region_->backend->BytesOfChannelsLast() : 0};
  }

  // Of what lies in the memory of a root.
  size_t BytesAt(size_t root) const {
    const TensorShape& shape = shapes_[root];
    if (channels_last_[root]) return BytesOf(shape) / sizeof(float) * region_->backend->BytesOfChannelsLast();
    return planes_[root] > 0 ? static_cast<size_t>(PlaneBytes(shape.dims, planes_[root])) : BytesOf(shape);
  }

  // What a step stores in tensors that other nodes make of its output.
  struct Stores {
    std::vector<ChannelMove> moves;
    std::vector<ValueId> tensors;
    bool keeps_output = true;
  };

  // Steps that only move channels need not run where the steps that make what they are fed store it in their place.
  void FindStores() {
    const std::vector<CompiledRegion::Op>& ops = region_->ops;
    std::vector<std::optional<size_t>> makers(region_->values);
    for (size_t i = 0; i < ops.size(); ++i) {
      if (ops[i].step != nullptr && !IsPiece(ops[i].output) && !IsEmpty(ops[i].output))
        makers[At(ops[i].output)] = i;
    }
    for (size_t i = 0; i < ops.size(); ++i) {
      if (ops[i].moves && makers[At(ops[i].output)] == i) is_moved_[i] = StoreMoved(ops[i], makers);
    }
    for (size_t i = 0; i < ops.size(); ++i) {
      if (!stores_[i].moves.empty()) stores_[i].keeps_output = IsRead(At(ops[i].output));
    }
  }

  // Has all makers of what `op` moves store it, or none.
  bool StoreMoved(const CompiledRegion::Op& op, const std::vector<std::optional<size_t>>& makers) {
    const std::vector<ChannelMove> moves = op.moves(FedShapes(op));
    if (moves.empty()) return false;
    std::map<size_t, Stores> more;
    for (size_t i = 0; i < moves.size(); ++i) {
      const size_t fed = At(op.fed[i]), root = Root(op.fed[i]);
      const std::optional<size_t> maker = makers[root];
      if (!maker || is_moved_[*maker] || BytesOf(shapes_[fed]) != BytesOf(shapes_[root]) ||
          shapes_[root].dims.empty() || shapes_[fed].dims.back() != shapes_[root].dims.back()) {
        return false;
      }
      Stores& stores = more.try_emplace(*maker, stores_[*maker]).first->second;
      stores.moves.push_back(moves[i]);
      stores.tensors.push_back(op.output);
    }
    for (const auto& [maker, stores] : more) {
      const CompiledRegion::Op& of = region_->ops[maker];
      if (!region_->backend->MayStore(*of.step, FedShapes(of), stores.moves)) return false;
    }
    for (auto& [maker, stores] : more) stores_[maker] = std::move(stores);
    return true;
  }

  // Tensors of the workspace may lie as planes of bits or with the channels last, unless they have other dims, too, or pieces,
  // or are stored channel by channel. Float results that are stored as codes besides may lie as float16.
  void FindForms(PlaneUse planes) {
    std::vector<bool> may(region_->values), has_other_dims(region_->values);
    std::vector<StepTensors> steps;
    for (size_t i = 0; i < region_->ops.size(); ++i) {
      const CompiledRegion::Op& op = region_->ops[i];
      if (op.step == nullptr || is_moved_[i] || IsPiece(op.output) || IsEmpty(op.output)) continue;
      const size_t root = At(op.output);
      may[root] = !homes_[root] && !leaves_[root] && stores_[i].moves.empty();
      StepTensors& step = steps.emplace_back(StepTensors{op.step.get(), FedShapes(op), {}, root});
      for (const ValueId id : op.fed) step.reads.push_back(Root(id));
    }
    for (size_t i = 0; i < region_->ops.size(); ++i) {
      const CompiledRegion::Op& op = region_->ops[i];
      if (is_moved_[i]) may[At(op.output)] = false;
      if (op.reshape || (op.step != nullptr && IsPiece(op.output))) {
        may[Root(op.fed[0])] = false;
        has_other_dims[Root(op.fed[0])] = true;
      }
    }
    std::vector<bool> may_last = may;
    for (size_t i = 0; i < region_->ops.size(); ++i) {
      const CompiledRegion::Op& op = region_->ops[i];
      if (stores_[i].moves.empty() || !stores_[i].keeps_output || !region_->backend->KeepsOrder(*op.step))
        continue;
      const size_t root = At(op.output);
      may_last[root] = !homes_[root] && !leaves_[root] && !has_other_dims[root];
    }
    channels_last_ = ChooseChannelsLast(*region_->backend, steps, std::move(may_last));
    is_turned_ = ChooseTurned(*region_->backend, steps, channels_last_);
    // What stores channels elsewhere reads bytes.
    for (size_t i = 0; i < region_->ops.size(); ++i) {
      if (!stores_[i].moves.empty()) may[Root(region_->ops[i].fed[0])] = false;
    }
    planes_ = ChoosePlanes(*region_->backend, steps, std::move(may), planes);
  }

  // How often steps that run read what lies there.
  int64_t ReadersOf(size_t root) const {
    int64_t readers = 0;
    for (size_t i = 0; i < region_->ops.size(); ++i) {
      const CompiledRegion::Op& op = region_->ops[i];
      if (op.step == nullptr || is_moved_[i] || IsPiece(op.output)) continue;
      readers += std::count_if(op.fed.begin(), op.fed.end(), [&](ValueId id) { return Root(id) == root; });
    }
    return readers;
  }
  // Whether a step that runs, or the caller, reads what lies there.
  bool IsRead(size_t root) const { return leaves_[root] || ReadersOf(root) > 0; }

  void AddStep(std::string_view name, std::span<const std::string> nodes, const Step& step,
               std::span<const ValueId> fed, std::span<const TensorShape> fed_shapes,
               const Location& output) {
    PlannedStep planned;
    planned.name = name;
    planned.nodes = nodes;
    planned.step = &step;
    planned.plan = step.Plan(fed_shapes);
    planned.fed_shapes.assign(fed_shapes.begin(), fed_shapes.end());
    std::vector<size_t>& offsets = fed_offsets_.emplace_back();
    for (const ValueId id : fed) {
      planned.fed.push_back(Use(id));
      offsets.push_back(offsets_[At(id)]);
    }
    planned.output = output;
    planned.workspace_at = lifetimes_.size();
    const int now = static_cast<int>(plan_.steps.size());
    lifetimes_.push_back({planned.plan->WorkspaceBytes(), now, now});
    plan_.steps.push_back(std::move(planned));
  }

  bool IsEmpty(ValueId id) const { return ElementCount(shapes_[At(id)].dims) == 0; }

  std::vector<const CompiledRegion::Op*> LastReaders() const {
    std::vector<const CompiledRegion::Op*> last(region_->values);
    for (size_t i = 0; i < region_->ops.size(); ++i) {
      const CompiledRegion::Op& op = region_->ops[i];
      if (op.step == nullptr || is_moved_[i]) continue;
      for (const ValueId id : op.fed) last[Root(id)] = &op;
    }
    return last;
  }

  // Where the output of `op` takes the place of a tensor that nobody reads later, writing it fetches no
  // memory into the cache, and a large tensor less pushes others out of it.
  void PlaceOver(const CompiledRegion::Op& op, const std::vector<const CompiledRegion::Op*>& last_readers) {
    const std::optional<size_t> over = op.step->Overwrites();
    if (!over || *over >= op.fed.size()) return;
    const size_t from = Root(op.fed[*over]), to = Root(op.output);
    const auto reads =
        std::count_if(op.fed.begin(), op.fed.end(), [&](ValueId id) { return Root(id) == from; });
    if (homes_[from] || homes_[to] || last_readers[from] != &op || reads != 1 ||
        BytesAt(from) != BytesAt(to) || channels_last_[from] != channels_last_[to] ||
        BytesOf(shapes_[At(op.fed[*over])]) != BytesOf(shapes_[to])) {
      return;
    }
    lifetime_of_[to] = lifetime_of_[from];
  }

  void AddSteps() {
    const std::vector<const CompiledRegion::Op*> last_readers = LastReaders();
    // Of the last two steps and of the last one, where they go with no other yet.
    const CompiledRegion::Op *before_last = nullptr, *before = nullptr;
    for (size_t i = 0; i < region_->ops.size(); ++i) {
      const CompiledRegion::Op& op = region_->ops[i];
      if (op.step == nullptr || is_moved_[i] || IsPiece(op.output) || IsEmpty(op.output)) continue;
      const bool has_stores = !stores_[i].moves.empty();
      const auto planes_fed = [&](size_t which) {
        return op.fed.size() > which ? planes_[Root(op.fed[which])] : 0;
      };
      const TensorPlanes planes{planes_fed(0), planes_[Root(op.output)], planes_fed(1)};
      const bool has_planes = planes != TensorPlanes{};
      std::vector<ValueId> fed = op.fed;
      if (TurnFed(op, fed)) before = before_last = nullptr;
      const ChannelsLast last = ChannelsLastOf(fed, op.output);
      const bool has_channels_last = last != ChannelsLast{};
      if (stores_[i].keeps_output) PlaceOver(op, last_readers);
      try {
        if (has_stores) {
          AddStoringStep(op, stores_[i], last);
        } else if (has_planes) {
          const Step& step = *plan_.variants.emplace_back(region_->backend->InPlanes(*op.step, planes));
          AddStep(op.name, op.nodes, step, op.fed, FedShapes(op), Use(op.output));
        } else if (has_channels_last) {
          const Step& step = *plan_.variants.emplace_back(region_->backend->InChannelsLast(*op.step, last));
          AddStep(op.name, op.nodes, step, fed, FedShapes(op), Use(op.output));
        } else {
          AddStep(op.name, op.nodes, *op.step, op.fed, FedShapes(op), Use(op.output));
        }
        step_ops_.resize(plan_.steps.size());
        step_ops_.back() = &op;
        const bool is_alone = has_stores || has_planes || has_channels_last;
        bool is_joined = !is_alone && before != nullptr && PutTogether(*before, op);
        if (!is_alone && before != nullptr && before_last != nullptr)
          is_joined = PutTogether(*before_last, *before, op) || is_joined;
        before_last = is_alone || is_joined ? nullptr : before;
        before = is_alone || is_joined ? nullptr : &op;
      } catch (const Error& e) {
        Fail(op.name, ": ", e.what());
      }
    }
  }

  ChannelsLast ChannelsLastOf(std::span<const ValueId> fed, ValueId output) const {
    ChannelsLast last;
    for (size_t i = 0; i < fed.size(); ++i) {
      if (channels_last_[Root(fed[i])]) last.Add(i);
    }
    last.y = channels_last_[Root(output)];
    return last;
  }

  // Puts turned tensors in the place of those that `op` would turn itself. Whether a step was added that turns one.
  bool TurnFed(const CompiledRegion::Op& op, std::vector<ValueId>& fed) {
    bool has_added = false;
    for (size_t i = 0; i < fed.size(); ++i) {
      const size_t root = Root(fed[i]);
      if (!is_turned_[root] || IsPiece(fed[i]) ||
          !region_->backend->TurnsChannelsLast(*op.step, FedShapes(op), i))
        continue;
      auto turned = turned_.find(root);
      if (turned == turned_.end()) {
        turned = turned_.emplace(root, AddTurned(fed[i])).first;
        has_added = true;
      }
      fed[i] = turned->second;
    }
    return has_added;
  }

  // A value beside those of the region, which a step makes of `id`.
  ValueId AddTurned(ValueId id) {
    const auto turned = static_cast<ValueId>(shapes_.size());
    const TensorShape shape = shapes_[At(id)];
    shapes_.push_back(shape);
    storage_.push_back(turned);
    offsets_.push_back(0);
    leaves_.push_back(false);
    homes_.emplace_back();
    lifetime_of_.emplace_back();
    planes_.push_back(0);
    channels_last_.push_back(true);
    is_turned_.push_back(false);
    const std::array fed = {id};
    const Step& step = *plan_.variants.emplace_back(region_->backend->CreateTurn());
    AddStep("channels last", {}, step, fed, std::span(&shape, 1), Use(turned));
    return turned;
  }

  void AddStoringStep(const CompiledRegion::Op& op, const Stores& stores, const ChannelsLast& last) {
    std::vector<ValueId> fed = op.fed;
    fed.insert(fed.end(), stores.tensors.begin(), stores.tensors.end());
    std::vector<TensorShape> shapes;
    shapes.reserve(fed.size());
    for (const ValueId id : fed) shapes.push_back(shapes_[At(id)]);
    const Step* step =
        plan_.variants.emplace_back(region_->backend->Storing(*op.step, stores.moves, stores.keeps_output))
            .get();
    if (last != ChannelsLast{})
      step = plan_.variants.emplace_back(region_->backend->InChannelsLast(*step, last)).get();
    AddStep(op.name, op.nodes, *step, fed, shapes,
            Use(stores.keeps_output ? op.output : stores.tensors.front()));
    plan_.steps.back().stores = stores.tensors.size();
  }

  // What the i-th step reads and makes, where that lies in planes, no other step has to do with its launch, and so many
  // tensors are fed.
  const CompiledRegion::Op* OpInPlanes(size_t i, size_t fed) const {
    if (i >= plan_.steps.size() || step_ops_[i] == nullptr) return nullptr;
    const PlannedStep& step = plan_.steps[i];
    const auto lies_in_planes = [](const Location& location) { return location.planes > 0; };
    const bool fits = step.fed.size() == fed && step.stores == 0 && lies_in_planes(step.output) &&
                      std::all_of(step.fed.begin(), step.fed.end(), lies_in_planes) &&
                      LauncherOf(plan_.steps, i) == i && step.with_next == nullptr;
    return fits ? step_ops_[i] : nullptr;
  }
  // Whether nothing but `readers` reads of steps needs what `op` makes.
  bool IsBetween(const CompiledRegion::Op& op, int64_t readers) const {
    const size_t root = Root(op.output);
    return !homes_[root] && !leaves_[root] && ReadersOf(root) == readers;
  }
  // Whether the step at `i` begins a residual block of three, where there is one before it as a part of the same launch.
  bool BeginsBlock(size_t i, bool follows) const {
    const CompiledRegion::Op *const a = OpInPlanes(i, 1), *const b = OpInPlanes(i + 1, 1),
                                    *const c = OpInPlanes(i + 2, 2);
    if (a == nullptr || b == nullptr || c == nullptr || !ReadsFirst(*b, *a) || !ReadsFirst(*c, *b) ||
        Root(c->fed[1]) != Root(a->fed[0]) || !IsBetween(*a, 1) || !IsBetween(*b, 1)) {
      return false;
    }
    if (!follows) return true;
    const CompiledRegion::Op& before = *step_ops_[i - 1];
    return ReadsFirst(*a, before) && IsBetween(before, 2);
  }
  // Residual blocks in a row as one launch, as many as the back end can.
  void PutBlocksTogether() {
    for (size_t i = 0; i < plan_.steps.size(); ++i) {
      size_t count = 0;
      while (BeginsBlock(i + 3 * count, count > 0)) ++count;
      for (; count > 0; --count) {
        std::vector<FedStep> steps;
        for (size_t step = i; step < i + 3 * count; ++step)
          steps.push_back({*plan_.steps[step].step, plan_.steps[step].fed_shapes});
        auto plan = region_->backend->PlanBlocks(steps);
        if (plan == nullptr) continue;
        plan_.steps[i].with_next = std::move(plan);
        plan_.steps[i].together = steps.size();
        i += steps.size() - 1;
        BeginAt(plan_.steps[i].output, i + 1 - steps.size());
        break;
      }
    }
  }

  // Whether `second` reads all that `first` makes, and that before all else.
  bool ReadsFirst(const CompiledRegion::Op& second, const CompiledRegion::Op& first) const {
    return !second.fed.empty() && Root(second.fed[0]) == Root(first.output) &&
           BytesOf(shapes_[At(second.fed[0])]) == BytesOf(shapes_[At(first.output)]);
  }
  // The `last`th step from the end, as the back end sees it.
  FedStep FedStepAt(size_t last) const {
    const PlannedStep& step = plan_.steps[plan_.steps.size() - last];
    return {*step.step, step.fed_shapes};
  }
  // What a step writes is alive from step `now` on.
  void BeginAt(const Location& written, size_t now) {
    if (written.kind != Location::Kind::kWorkspace) return;
    int& first = lifetimes_[written.at].first;
    first = std::min(first, static_cast<int>(now));
  }

  // The last two steps as one launch, where the back end can. What the second makes is then alive beside what
  // the first is fed.
  bool PutTogether(const CompiledRegion::Op& first, const CompiledRegion::Op& second) {
    if (second.fed.size() != 1 || !ReadsFirst(second, first) || second.step->Overwrites()) return false;
    const std::array steps = {FedStepAt(2), FedStepAt(1)};
    PlannedStep& a = plan_.steps[plan_.steps.size() - 2];
    a.with_next = region_->backend->PlanTogether(steps);
    if (a.with_next == nullptr) return false;
    BeginAt(plan_.steps.back().output, plan_.steps.size() - 2);
    return true;
  }

  // The last three: nobody but the second reads what the first makes. What the others make is then alive beside what that
  // is fed; it may lie where something else lay that the second is fed.
  bool PutTogether(const CompiledRegion::Op& first, const CompiledRegion::Op& second,
                   const CompiledRegion::Op& third) {
    const size_t between = Root(first.output);
    if (first.fed.size() != 1 || !ReadsFirst(second, first) || third.fed.size() != 1 ||
        !ReadsFirst(third, second) || third.step->Overwrites() || homes_[between] || leaves_[between] ||
        ReadersOf(between) != 1) {
      return false;
    }
    PlannedStep &a = plan_.steps[plan_.steps.size() - 3], &b = plan_.steps[plan_.steps.size() - 2];
    if (a.fed[0].kind == b.output.kind && a.fed[0].at == b.output.at) return false;
    const std::array steps = {FedStepAt(3), FedStepAt(2), FedStepAt(1)};
    auto plan = region_->backend->PlanTogether(steps);
    if (plan == nullptr) return false;
    a.with_next = std::move(plan);
    a.together = steps.size();
    BeginAt(b.output, plan_.steps.size() - 3);
    BeginAt(plan_.steps.back().output, plan_.steps.size() - 3);
    return true;
  }

  void AddCopies() {
    for (const size_t o : copied_) {
      const CompiledRegion::Output& output = region_->outputs[o];
      if (IsEmpty(output.value)) continue;
      const std::array fed = {output.value};
      const std::array fed_shapes = {shapes_[At(output.value)]};
      AddStep(output.name, {}, *region_->copy, fed, fed_shapes, OutputLocation(o));
    }
  }

  void PlaceWorkspace() {
    const MemoryPlan memory = PlanMemory(lifetimes_, region_->backend->Alignment());
    plan_.workspace_bytes = memory.total;
    const auto place = [&](Location& location) {
      if (location.kind == Location::Kind::kWorkspace) location.at = memory.offsets[location.at];
    };
    for (size_t s = 0; s < plan_.steps.size(); ++s) {
      PlannedStep& step = plan_.steps[s];
      for (size_t i = 0; i < step.fed.size(); ++i) {
        place(step.fed[i]);
        if (step.fed[i].kind == Location::Kind::kWorkspace) step.fed[i].at += fed_offsets_[s][i];
      }
      place(step.output);
      step.workspace_at = memory.offsets[step.workspace_at];
    }
  }

  std::shared_ptr<const CompiledRegion> region_;
  RegionPlan plan_;
  std::vector<TensorShape> shapes_;                 // by value, as the eight below
  std::vector<ValueId> storage_;                    // see Root
  std::vector<size_t> offsets_;                     // bytes from where the root begins
  std::vector<bool> leaves_;                        // what an output of the region lies in
  std::vector<std::optional<Location>> homes_;      // of roots outside the workspace
  std::vector<std::optional<size_t>> lifetime_of_;  // of roots in the workspace
  std::vector<int> planes_;                         // of roots
  std::vector<bool> channels_last_;                 // of roots
  std::vector<bool> is_turned_;       // of roots: for those that read them with the channels last
  std::map<size_t, ValueId> turned_;  // by root, what holds it so
  std::vector<Stores> stores_;        // by op
  std::vector<bool> is_moved_;        // by op: stored by those that make what it is fed
  std::vector<size_t> copied_;        // outputs that are copied at the end
  std::vector<const CompiledRegion::Op*> step_ops_;  // by step: of what it is, or null
  std::vector<std::vector<size_t>> fed_offsets_;     // by step: of what it is fed
  std::vector<Lifetime> lifetimes_;                  // of tensors and of the steps' scratch memory
};

std::string PlaceText(const Location& place) {
  static constexpr const char* kKinds[] = {"external ", "workspace ", "constant "};
  std::string text = kKinds[static_cast<size_t>(place.kind)] + std::to_string(place.at);
  if (place.number_bytes > 0) return text + (place.number_bytes == 2 ? " (nhwc float16)" : " (nhwc)");
  if (place.planes == 0) return text;
  return text + " (" + std::to_string(place.planes) + (place.planes == 1 ? " plane)" : " planes)");
}

std::span<const Location> FedOf(const PlannedStep& step) {
  return std::span(step.fed).first(step.fed.size() - step.stores);
}
std::span<const Location> StoredOf(const PlannedStep& step) { return std::span(step.fed).last(step.stores); }

void PrintPlaces(std::span<const Location> places, std::ostream& text) {
  for (size_t i = 0; i < places.size(); ++i) text << (i == 0 ? "" : ", ") << JsonString(PlaceText(places[i]));
}

// The kernel of a step, or the one that does it together with the step before or behind it.
std::string KernelText(const std::vector<PlannedStep>& steps, size_t i) {
  const PlannedStep& launcher = steps[LauncherOf(steps, i)];
  if (&launcher != &steps[i]) return launcher.with_next->Text() + " with the last";
  if (launcher.with_next != nullptr)
    return launcher.with_next->Text() + (launcher.together > 3
                                             ? " with the next " + std::to_string(launcher.together - 1)
                                         : launcher.together > 2 ? " with the next two"
                                                                 : " with the next");
  const std::vector<Location>& fed = steps[i].fed;
  const bool reads_planes = !fed.empty() && fed[0].planes > 0, makes_planes = steps[i].output.planes > 0;
  const bool adds_planes = fed.size() > 1 && fed[1].planes > 0;
  return steps[i].plan->Text() + (reads_planes ? ", reads planes" : "") +
         (adds_planes ? ", adds planes" : "") + (makes_planes ? ", makes planes" : "");
}

}  // namespace

size_t LauncherOf(std::span<const PlannedStep> steps, size_t i) {
  constexpr size_t kMostTogether = 24;  // eight residual blocks
  for (size_t behind = std::min(i, kMostTogether - 1); behind > 0; --behind) {
    const PlannedStep& before = steps[i - behind];
    if (before.with_next != nullptr && before.together > behind) return i - behind;
  }
  return i;
}

RegionPlan MakePlan(std::shared_ptr<const CompiledRegion> region, std::span<const TensorShape> inputs,
                    PlaneUse planes) {
  return Planner(std::move(region), inputs).Make(planes);
}

std::string RegionPlan::Text() const {
  std::ostringstream text;
  text << "region of " << steps.size() << " steps, workspace " << workspace_bytes << " bytes\n";
  for (size_t i = 0; i < steps.size(); ++i) {
    const PlannedStep& step = steps[i];
    text << "  " << step.name << ": " << KernelText(steps, i)
         << (step.plan->IsMeasured() ? " (measured)" : "") << ", from";
    for (const Location& fed : FedOf(step)) text << ' ' << PlaceText(fed);
    text << " to " << PlaceText(step.output);
    for (const Location& stored : StoredOf(step)) text << ' ' << PlaceText(stored);
    text << '\n';
  }
  return text.str();
}

std::string RegionPlan::Json() const {
  std::ostringstream text;
  text << "{\"lowbit\": \"region\", \"workspace_bytes\": " << workspace_bytes << ", \"steps\": [";
  for (size_t i = 0; i < steps.size(); ++i) {
    const PlannedStep& step = steps[i];
    text << (i == 0 ? "" : ", ") << "{\"nodes\": [";
    for (size_t n = 0; n < step.nodes.size(); ++n) text << (n == 0 ? "" : ", ") << JsonString(step.nodes[n]);
    text << "], \"kernel\": " << JsonString(KernelText(steps, i))
         << (step.plan->IsMeasured() ? ", \"measured\": true" : "") << ", \"from\": [";
    PrintPlaces(FedOf(step), text);
    text << "], \"to\": " << JsonString(PlaceText(step.output));
    if (step.stores > 0) {
      text << ", \"stores\": [";
      PrintPlaces(StoredOf(step), text);
      text << ']';
    }
    text << '}';
  }
  text << "]}\n";
  return text.str();
}

}  // namespace lowbit::ep
