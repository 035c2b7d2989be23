"""Old import paths: one table that maps the names of old modules to where they are now.

Existing programs import some names from paths that were never public (`monarch._src...`,
`monarch._rust_bindings...`), pickles name classes by those paths, and users' bootstrap commands
run `python -m monarch._src.actor.bootstrap_main`. None of these modules exists as a file here. A
finder at the very end of `sys.meta_path` creates each of them on demand. Names of such a module are
looked up on access, in the module that defines them, their *home*:

- A real module always takes precedence, and ordinary imports are not slowed down: the finder is
  the last one.
- Names are neither copied nor cached: a name that is read through an old path is the object that
  its home has at that moment.
- There are no stubs. A name that is an internal of the reference implementation and has no
  counterpart raises `ImportError` with a replacement. Attribute access raises `ImportError` too,
  since ``from module import name`` hides the text of an `AttributeError`.
- A home that needs a package which is not installed raises `ImportError` with the extra to install.
- Importing an old path does not load a home. So a home may itself define classes that claim an old
  path (``__module__``), without a cycle.

Homes are strings, so this table is no dependency in the sense of the layer contracts.

Rejected: a tree of re-exporting files, which would be sixty files with the content of this table.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import warnings
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.abc import Loader
    from types import CodeType, ModuleType

#: ``{old module: {home: "name name old=new"}}``. A home is a module; a new name is an attribute
#: of it, or of one of its objects.
PATHS: dict[str, dict[str, str]] = {
    "monarch.actor.concurrent": {"monarch.actor": "concurrent_endpoint"},
    "monarch._src.actor.actor_mesh": {
        "monarch.actor": """
            Accumulator Actor ActorError Channel Context Point Port PortReceiver ValueMesh
            as_endpoint attach context current_actor_name current_rank current_size
            enable_transport send shutdown_context
        """,
        "monarch._engine.mesh.meshes.actor_mesh": "ActorMesh",
        "monarch.config": "configure",  # scripts of forge, before they attach to workers
        "monarch._engine.mesh.call.context": """
            CreatorInstance Instance _context _set_context=_context.set
        """,
        "monarch._engine.mesh.call.endpoint": "NotAnEndpoint",
        "monarch._engine.mesh.call.port": "RankedPortReceiver",
        "monarch._compat": "IN_PAR",
    },
    "monarch._src.actor.bootstrap": {
        "monarch.actor": """
            attach_to_workers run_worker_loop_forever run_worker_loop_until_shutdown
            start_worker_loop_forever
        """,
    },
    "monarch._src.actor.bootstrap_main": {
        "monarch._engine.runtime.agent.bootstrap": "main invoke_main=main",
    },
    "monarch._src.actor.concurrent": {
        "monarch.actor": "concurrent_endpoint",
        # verl, for the endpoints of TorchStore that it wraps
        "monarch._reference.explicit_port": """
            _explicit_response_signature=explicit_response_signature
        """,
    },
    "monarch._src.actor.debugger.debug_command": {
        "monarch._debug": "Attach Cast Continue DebugCommand Help ListCommand Quit",
    },
    "monarch._src.actor.debugger.debug_controller": {
        "monarch.actor": "debug_controller",
        "monarch._debug": "DebugController",
    },
    "monarch._src.actor.debugger.debug_io": {
        "monarch._debug": "DebugCliIO DebugIO DebugIOError DebugStdIO",
    },
    "monarch._src.actor.debugger.debug_session": {
        "monarch._debug": "DebugSession DebugSessionInfo DebugSessions",
    },
    "monarch._src.actor.endpoint": {
        "monarch.actor": "Endpoint Extent endpoint",
        "monarch._engine.mesh.call.endpoint": "EndpointProperty NotAnEndpoint",
    },
    "monarch._src.actor.future": {"monarch.actor": "Future returns_future"},
    "monarch._src.actor.host_mesh": {
        "monarch.actor": "HostMesh default_bootstrap_cmd this_host this_proc",
    },
    "monarch._src.actor.logging": {
        "monarch._output.logging_option": "LoggingManager flush_all_proc_mesh_logs",
    },
    "monarch._src.actor.mock": {
        "monarch._reference.mock": """
            get_actor_class=mock_of get_actor_mock_registry_state=registry
            get_tensor_engine_factory=engine_factory_of
            get_tensor_engine_mock_registry_state=engine_registry
            patch_actor patch_tensor_engine
            set_actor_mock_registry_state=install
            set_tensor_engine_mock_registry_state=install_engines
        """,
    },
    # verl registers codecs at the start of each worker, and takes objects apart into storages.
    "monarch._src.actor.pickle": {
        "monarch._reference.pickling": """
            _Pickler _TorchPickler _ensure_torch_pickle flatten unflatten
        """,
    },
    "monarch._src.actor.proc_mesh": {
        "monarch.actor": "ProcMesh get_or_spawn_controller",
        "monarch._engine.mesh.meshes.controller": """
            _ControllerController _get_controller_controller
        """,
        "monarch._engine.mesh.meshes.proc_mesh": """
            get_active_proc_meshes register_proc_mesh_spawn_callback
            unregister_proc_mesh_spawn_callback
        """,
    },
    "monarch._src.actor.shape": {
        "monarch._engine.shapes": "Extent MeshTrait NDSlice=Slice Shape ShapeExt Slice",
    },
    "monarch._src.actor.supervision": {
        "monarch.actor": "MeshFailure unhandled_fault_hook",
        "monarch._engine.base.errors": "UnhandledFaultHookException",
    },
    "monarch._src.actor.telemetry": {
        "monarch.actor": "get_meter span traced",
        "monarch._telemetry": """
            METER Counter Histogram Meter TracingForwarder UpDownCounter get_monarch_tracer
        """,
    },
    "monarch._src.job.job": {
        "monarch.job": """
            DEFAULT_JOB_PATH JobState JobTrait LocalJob ProcessJob SSHJob exec_command job_load
            job_loads
        """,
        "monarch.job.bash_actor": "BashActor",
        "monarch.job.batch": "BatchJob",
        "monarch.job.login": "LoginJob ProcessState",
    },
    "monarch._src.job.process": {"monarch.job": "ProcessJob"},
    "monarch._src.job.slurm": {"monarch.job": "SlurmJob"},
    "monarch._src.rdma.rdma": {
        "monarch.rdma": """
            RDMAAction RDMABuffer RDMAReadTransferWarning RDMATcpFallbackWarning
            RDMAWriteTransferWarning get_rdma_backend is_rdma_available
        """,
    },
    # The trainers of forge subclass it, and call its `_setup_env`.
    "monarch._src.spmd.actor": {"monarch.spmd": "SPMDActor"},
    "monarch._rust_bindings": {"monarch._compat": "has_tensor_engine"},
    "monarch._rust_bindings.rdma": {
        "monarch.rdma": "RdmaInitError=RdmaUnavailable",
        "monarch.rdma.hardware": "rdma_supported",  # TorchStore, to choose its transport
    },
    "monarch._rust_bindings.monarch_hyperactor.actor": {"monarch.actor": "Actor"},
    "monarch._rust_bindings.monarch_hyperactor.buffers": {
        "monarch._reference.buffers": "Buffer FrozenBuffer",
    },
    "monarch._rust_bindings.monarch_hyperactor.channel": {
        "monarch._engine.base.address": "BindSpec ChannelAddr ChannelTransport",
    },
    "monarch._rust_bindings.monarch_hyperactor.config": {
        "monarch.config": """
            Encoding clear_runtime_config configure get_global_config get_runtime_config
        """,
        "monarch._engine.base.settings": """
            reload_config_from_env=settings.reload_from_env
            reset_config_to_defaults=settings.reset_to_defaults
        """,
    },
    "monarch._rust_bindings.monarch_hyperactor.endpoint": {
        "monarch._engine.mesh.call.endpoint": "ActorEndpoint ValueStream",
    },
    "monarch._rust_bindings.monarch_hyperactor.handle": {
        "monarch._engine.base.errors": "WouldBlockRuntime",
    },
    "monarch._rust_bindings.monarch_hyperactor.host_mesh": {
        "monarch._engine.base.bootstrap_command": "BootstrapCommand",
        "monarch.actor": "HostMesh",
    },
    "monarch._rust_bindings.monarch_hyperactor.mailbox": {
        "monarch.actor": "PortReceiver",
        "monarch._engine.base.failure": "UndeliverableMessageEnvelope",
    },
    "monarch._rust_bindings.monarch_hyperactor.pickle": {  # verl, to try its codecs
        "monarch._reference.pickling": "PicklingState pickle",
    },
    "monarch._rust_bindings.monarch_hyperactor.proc": {
        "monarch._reference.identity": "ActorAddr ProcId Uid",
    },
    "monarch._rust_bindings.monarch_hyperactor.pytokio": {
        "monarch._engine.base.errors": "WouldBlockRuntime",
        "monarch._reference.python_task": "PythonTask",  # verl, for the answers of TorchStore
    },
    "monarch._rust_bindings.monarch_hyperactor.shape": {
        "monarch._engine.shapes": "Extent Point=BasePoint Region Shape Slice",
    },
    "monarch._rust_bindings.monarch_hyperactor.supervision": {
        "monarch._engine.base.errors": "SupervisionError",
        "monarch._engine.base.failure": "MeshFailure",
    },
    "monarch._rust_bindings.monarch_hyperactor.telemetry": {
        "monarch._telemetry.events": "instant_event",  # fault hooks of programs
    },
    "monarch._rust_bindings.monarch_hyperactor.value_mesh": {"monarch.actor": "ValueMesh"},
    "monarch.builtins": {"monarch._tensors.process_log": "log_remote set_logging_level_remote"},
    "monarch.builtins.random": {
        "monarch._tensors.remote": "remote",
        "monarch._tensors.generators": """
            get_rng_state_all_cuda_remote get_rng_state_remote manual_seed_all_cuda_remote
            manual_seed_cuda_remote random_seed_remote seed_remote set_manual_seed_remote
            set_rng_state_all_cuda_remote set_rng_state_remote
        """,
    },
    "monarch._testing": {
        "monarch._tensors.testing": "TestingContext mock_mesh",
        "monarch._tensors.mesh_of_procs": "spawn_tensor_engine",
        "monarch._tensors.errors": "DeviceException RemoteException",
        "monarch._tensors.mesh": "DeviceMesh",
        "monarch.actor": "NDSlice=Slice ProcMesh",
        "monarch.job": "ProcessJob",
    },
    "monarch.cached_remote_function": {
        "monarch._tensors.remote_autograd": """
            RemoteAutogradFunction backward_remote_fn forward_remote_fn remote_autograd_function
        """,
        "monarch._tensors.remote": "remote",
        "monarch._tensors.process_group": "RemoteProcessGroup",
    },
    "monarch.common._coalescing": {
        "monarch._tensors.coalescing": "coalescing",
        "monarch._tensors.recording": "compile",
        "monarch._tensors.tensor": "Tensor",
    },
    "monarch.common.borrows": {"monarch._tensors.borrow": "Borrow"},
    "monarch.common.device_mesh": {
        "monarch._tensors.mesh": "DeviceMesh get_active_mesh no_mesh",
        "monarch._tensors.process_group": "RemoteProcessGroup",
        "monarch._tensors.stream": "Stream",
        "monarch._tensors.tensor": "Tensor",
        "monarch._tensors.transfer": "MeshSliceTensor slice_mesh to_mesh",
        "monarch._engine.shapes": "MeshTrait",
        "monarch.actor": "NDSlice=Slice Shape",
    },
    "monarch.common.function": {
        "monarch._tensors.function": """
            ResolvableFromCloudpickle ResolvableFunction ResolvableFunctionFromPath
            maybe_resolvable_function resolvable_function resolvers
        """,
    },
    "monarch.common.future": {
        "monarch._reference.polled_future": "Future stream",
        "monarch._tensors.errors": "RemoteException",
    },
    "monarch.common.invocation": {
        "monarch._reference.identity": "ActorAddr",
        "monarch._tensors.errors": "DeviceException RemoteException",
    },
    "monarch.common.opaque_ref": {"monarch._tensors.opaque_ref": "OpaqueRef"},
    "monarch.common.pipe": {
        "monarch._tensors.function": "ResolvableFunctionFromPath",
        "monarch._tensors.pipe": "FakePipe Pipe create_pipe remote_generator",
        "monarch._tensors.remote": "Remote remote",
        "monarch._tensors.tensor": "Tensor",
    },
    "monarch.common.remote": {
        "monarch._reference.polled_future": "OldFuture=Future",
        "monarch._tensors.function": """
            ResolvableFunction ResolvableFunctionFromPath resolvable_function
        """,
        "monarch._tensors.process_group": "RemoteProcessGroup",
        "monarch._tensors.remote": "Remote call_on_shard_and_fetch remote",
        "monarch.actor": "Endpoint Extent Future Shape",
    },
    "monarch.common.stream": {
        "monarch._tensors.borrow": "Borrow",
        "monarch._tensors.stream": "Stream get_active_stream",
    },
    "monarch.common.tensor": {
        "monarch._tensors.function": "ResolvableFunction ResolvableFunctionFromPath",
        "monarch._tensors.stream": "Stream",
        "monarch.actor": "NDSlice=Slice",
        "monarch._tensors.tensor": "Tensor",
        "monarch._tensors.reduction": "reduce reduce_",
        "monarch._tensors.transfer": "MeshSliceTensor",
    },
    "monarch.fetch": {
        "monarch.actor": "Future",
        "monarch._tensors.fetch": "fetch_shard inspect show",
        "monarch._tensors.remote": "call_on_shard_and_fetch",
    },
    "monarch.checkpoint": {"monarch._tensors.checkpoint": "load save"},
    "monarch.dtensor": {"monarch._tensors.torch_mesh": "TorchMesh torch_mesh"},
    "monarch.gradient": {"monarch._tensors.gradient": "GradientGenerator"},
    "monarch.gradient_generator": {
        "monarch._tensors.gradient": """
            GradGenerator GradientGenerator grad_generator gradient_execution_order
        """,
        "monarch._tensors.grad_function": "GradFunction grad_function",
    },
    "monarch.mesh_controller": {
        "monarch._tensors.errors": "DeviceException RemoteException",
        "monarch._tensors.mesh_of_procs": "spawn_tensor_engine",
        "monarch._reference.identity": "ActorAddr",
        "monarch._reference.polled_future": "OldFuture=Future",
        "monarch._tensors.function": "ResolvableFunction",
        "monarch._tensors.mesh": "DeviceMesh",
        "monarch._tensors.stream": "Stream",
        "monarch._tensors.tensor": "Tensor",
        "monarch._engine.mesh.call.context": "Instance",
        "monarch.actor": "Channel NDSlice=Slice Point context",
    },
    "monarch.memory": {
        "monarch._tensors.memory": "dump_memory_snapshot record_memory_history",
        "monarch._tensors.remote": "remote",
    },
    "monarch.notebook": {
        "monarch._reference.notebook": "reserve_torchx",
        "monarch._tensors.local_mesh": "world_mesh",
        "monarch._tensors.mesh": "DeviceMesh",
        "monarch._tensors.remote": "remote",
    },
    "monarch.opaque_module": {
        "monarch._tensors.opaque_module": "OpaqueModule",
        "monarch._tensors.opaque_object": "OpaqueObject",
        "monarch._tensors.opaque_ref": "OpaqueRef",
        "monarch._tensors.remote": "call_on_shard_and_fetch remote",
    },
    "monarch.opaque_object": {
        "monarch._tensors.function": "ResolvableFunction resolvable_function",
        "monarch._tensors.remote": "call_on_shard_and_fetch remote",
        "monarch._tensors.opaque_object": "OpaqueObject opaque_method",
        "monarch._tensors.opaque_ref": "OpaqueRef",
    },
    "monarch.parallel": {
        "monarch._tensors.data_parallel": "data_parallel",
        "monarch._tensors.pipelining": "PipelineParallelism get_parameter_udf",
    },
    "monarch.parallel.pipelining.runtime": {
        "monarch._tensors.fetch": "fetch_shard",
        "monarch._tensors.mesh": "DeviceMesh",
        "monarch._tensors.opaque_module": "OpaqueModule",
        "monarch._tensors.opaque_ref": "OpaqueRef",
        "monarch._tensors.pipelining": "PipelineParallelism get_parameter get_parameter_udf",
        "monarch._tensors.remote": "remote",
        "monarch._tensors.stream": "Stream",
        "monarch._tensors.tensor": "Tensor",
    },
    "monarch.profiler": {
        "monarch._tensors.profiler": "Schedule WorkerRecordFunction profile record_function",
        "monarch._tensors.remote": "remote",
        "monarch._tensors.remote_class": "ControllerRemoteClass WorkerRemoteClass",
    },
    "monarch.simulator.communication_model": {
        "monarch._tensors.communication_model": """
            NetworkConfig estimate_collective_time_us estimate_send_time_us tensor_size_bytes
        """,
    },
    "monarch.simulator": {
        "monarch._tensors.communication_model": "NetworkConfig",
        "monarch._tensors.simulator.cost_model": "CostModel Hardware",
        "monarch._tensors.simulator.engine": "set_meta",
        "monarch._tensors.simulator.interface": "Simulator replay",
        "monarch._tensors.simulator.machine": "Estimate",
        "monarch._tensors.simulator.measured": "RuntimeProfiler profile_function",
        "monarch._tensors.simulator.timing": "RuntimeEstimator TimingType",
    },
    "monarch.simulator.interface": {
        "monarch.actor": "NDSlice=Slice",
        "monarch._tensors.mesh": "DeviceMesh",
        "monarch._tensors.simulator.interface": """
            Simulator SimulatorBackendMode SimulatorInterface SimulatorTraceMode
        """,
        "monarch._tensors.simulator.ir": "IRGraph",
    },
    "monarch.simulator.ir": {"monarch._tensors.simulator.ir": "Command IRGraph"},
    "monarch.simulator.profiling": {
        "monarch._tensors.function": "resolvable_function",
        "monarch._tensors.simulator.command_history": "CommandHistory",
        "monarch._tensors.simulator.measured": "RuntimeProfiler profile_function",
        "monarch._tensors.simulator.timing": "RuntimeEstimator TimingType",
    },
    "monarch.simulator.simulator": {
        "monarch.actor": "NDSlice=Slice",
        "monarch._tensors.errors": "DeviceException",
        "monarch._tensors.function": "ResolvableFunction ResolvableFunctionFromPath",
        "monarch._tensors.mesh": "DeviceMesh",
        "monarch._tensors.simulator.command_history": "CommandHistory",
        "monarch._tensors.simulator.interface": """
            SimulatorBackendMode SimulatorController SimulatorInterface SimulatorTraceMode
            upload_trace
        """,
        "monarch._tensors.simulator.ir": "IRGraph",
        "monarch._tensors.simulator.machine": "TraceEvent",
        "monarch._tensors.simulator.measured": "RuntimeProfiler",
        "monarch._tensors.simulator.task": "Borrow EventTask Task",
        "monarch._tensors.simulator.timing": "RuntimeEstimator",
        "monarch._tensors.simulator.trace": """
            compress_workers_range dump_memory_trace dump_process_name dump_thread_event_trace
            file_path_with_iter
        """,
    },
    "monarch.simulator.task": {
        "monarch._tensors.simulator.task": "Borrow EventTask Task TaskState",
    },
    "monarch.python_local_mesh": {
        "monarch._tensors.errors": "DeviceException RemoteException",
        "monarch._tensors.local_mesh": "python_local_mesh world_mesh",
    },
    "monarch.random": {
        "monarch._tensors.random": "State get_state make_deterministic new_state set_state",
        "monarch._tensors.remote": "remote",
        "monarch._tensors.tensor": "Tensor",
    },
    "monarch.remote_class": {
        "monarch._tensors.remote_class": "ControllerRemoteClass WorkerRemoteClass",
        "monarch._tensors.remote": "remote",
    },
    "monarch.safe_torch": {"monarch._tensors.tensor": "torch"},
    "monarch.tensor_engine": {},
    "monarch.tensorboard": {"monarch._tensors.tensorboard": "Tensorboard"},
    "monarch.timer": {
        "monarch._tensors.timer": """
            ExecutionTimer execution_timer_start execution_timer_stop get_execution_timer_average_ms
            get_latest_timer_measurement
        """,
    },
    "monarch.timer.execution_timer": {
        "monarch._tensors.timer": """
            ExecutionTimer execution_timer_start execution_timer_stop get_execution_timer_average_ms
            get_execution_timer_summary get_latest_timer_measurement get_time_perfcounter
        """,
    },
    # torchft's replicas, and others that were written for early releases
    "monarch.utils": {"monarch.spmd": "setup_env_for_distributed=setup_torch_elastic_env_async"},
}

#: Former public aliases: each has the names of its target, and warns with the path to import from.
DEPRECATED = {
    "monarch.actor_mesh": ("monarch._src.actor.actor_mesh", "monarch.actor"),
    "monarch.bootstrap_main": (
        "monarch._src.actor.bootstrap_main",
        "monarch._src.actor.bootstrap_main",
    ),
    "monarch.proc_mesh": ("monarch._src.actor.proc_mesh", "monarch.actor"),
}
PATHS.update({alias: PATHS[target] for alias, (target, _) in DEPRECATED.items()})

#: Modules that *are* another object: another module, because programs assign to its attributes; or
#: a function, which is an attribute of its package by the same name, whatever was imported first.
SAME = {
    "monarch._src.actor.config": "monarch._output.log_prefix",
    "monarch.builtins.log": "monarch._tensors.process_log",
    "monarch.world_mesh": "monarch._tensors.local_mesh:world_mesh",
}

#: The programs that ``python -m`` runs.
PROGRAMS: dict[str, str] = dict.fromkeys(
    ("monarch._src.actor.bootstrap_main", "monarch.bootstrap_main"),
    "monarch._engine.runtime.agent.bootstrap",
)

_TASKS = "asynchronous work is a monarch.actor.Future here; write `async def` with returns_future"
_WIRE = "messages are frames of the engine here; use endpoints, or Channel, Port and send"
_CODEC = "the payload format is the engine's own; pickle objects with cloudpickle"
_LOGS = "use ProcMesh.logging_option()"
_SPANS = "use span, traced and get_meter of monarch.actor"
_LAUNCH = "there are no custom launchers; pass a BootstrapCommand to HostMesh.spawn_procs()"
_MESHES = "there is no native mesh underneath; use the mesh object itself"
_TENSORS = "this part of the tensor engine is not in this release"
_SIMULATED = "the simulator has parts of its own; use monarch.Simulator"
_TIMES = "give times to Simulator(runtime=...): a RuntimeEstimator or a CostModel"
_ENGINE = "it is a part of the reference's tensor engine; use remote(function, propagate=...)"
_CLIENT = "a device mesh is its own client; use spawn_tensor_engine(), or mock_mesh() in tests"
_GROUPS = "pass DeviceMesh.process_group(dims) to a remote function, which gets a group of torch"
_STAGES = "give PipelineParallelism modules or OpaqueModules, and a loss function"
_COMPANY = "it is for a scheduler inside one company; use the jobs of monarch.job"
_SUPERVISOR = "processes are those of hosts; use monarch.actor.this_host().spawn_procs()"
_NATIVE = "it tests native code, and there is none here"

#: Internals of the reference without a counterpart, each with a replacement.
INTERNAL: dict[str, dict[str, str]] = {
    "monarch._src.actor.actor_mesh": {
        "_client_context": "outside actors, monarch.actor.context() is the client's",
    },
    "monarch._src.actor.host_mesh": {
        "_spawn_admin": "the admin server is not part of this release",
        "create_local_host_mesh fake_in_process_host": "use monarch.actor.this_host()",
        "hosts_from_config": "it moved to monarch.job",
    },
    "monarch._src.actor.logging": {"_pending_flush_tasks": _LOGS},
    "monarch._src.actor.proc_mesh": {"HyProcMesh": _MESHES},
    "monarch._testing": {"Client MockController": _CLIENT},
    "monarch.cached_remote_function": {
        "DummyProcessGroup SingleControllerProcessGroupWrapper": _GROUPS,
        "manage_grads worker_autograd_function_backward": _ENGINE,
        "worker_autograd_function_forward": _ENGINE,
    },
    "monarch.common._coalescing": {
        "CacheEntry CoalescingState is_active is_recording": "use coalescing() and compile()",
        "InputChecker TensorGroup TensorGroupPattern": _ENGINE,
        "fake_call flatten hashable_tensor_flatten": _ENGINE,
    },
    "monarch.common.borrows": {"StorageAliases": "use Stream.borrow()"},
    "monarch.common.device_mesh": {
        "ActivateGuard activate_first_context_manager": "use DeviceMesh.activate()",
        "DeviceMeshInfo DeviceMeshStatus Referenceable": _CLIENT,
        "tensor_to_table": "use DeviceMesh.to_table()",
    },
    "monarch.common.function": {"function_to_import_path": "use resolvable_function()"},
    "monarch.common.future": {"TTL": "futures take timeout=, in seconds"},
    "monarch.common.invocation": {"Invocation": _ENGINE},
    "monarch.common.opaque_ref": {"wrap_create": "use OpaqueRef() in a remote function"},
    "monarch.common.pipe": {"Referenceable dtensor_check fake_call flatten": _ENGINE},
    "monarch.common.remote": {
        "DummyProcessGroup": _GROUPS,
        "OncePortRef PortRef": _WIRE,
        "InputChecker RemoteIfy RemoteImpl TensorGroup TensorPlaceholder": _ENGINE,
        "dtensor_check dtensor_dispatch fake_call flatten hashable_tensor_flatten": _ENGINE,
        "remote_identity": "use fetch_shard(value)",
    },
    "monarch.common.stream": {
        "Referenceable StreamRef fake_call": _ENGINE,
        "activate_first_context_manager": "use Stream.activate()",
    },
    "monarch.common.tensor": {
        "BaseTensor HasDeviceMesh InputChecker Invocation Referenceable": _ENGINE,
        "DropLocation StorageAliases": "Tensor.drop() keeps the place for its error messages",
        "check_torch_version get_built_pytorch_version": "there is no code built for one torch",
        "dtensor_check dtensor_dispatch fake_call flatten handle_lift_fresh_dispatch": _ENGINE,
    },
    "monarch.fetch": {"remote_identity": "use fetch_shard(value)"},
    "monarch.mesh_controller": {
        "Client Controller MeshClient TController": _CLIENT,
        "InputChecker Ref SendResultOfActorCall StreamRef dtensor_check flatten": _ENGINE,
        "MessageResult LogMessage MethodSpecifier PendingMessage PicklingState": _WIRE,
        "OncePortRef PortId PortRef PythonMessageKind UnflattenArg": _WIRE,
        "PdbWrapper ReadWrapper WriteWrapper": "breakpoint() in a remote function is served",
        "actor_rref create_actor_message_kind": "use endpoint.rref()",
    },
    "monarch.notebook": {
        "Context ControllerImporterServer HostConnected cleanup get_message_queue": _SUPERVISOR,
        "host_main initialize_logging log register_importer": _SUPERVISOR,
        "MastJob connect get_mast_notebook_jobs launch_mast list_mast_jobs": _COMPANY,
        "mast_get_jobs mast_job_is_valid mast_mesh reserve": _COMPANY,
    },
    "monarch.opaque_module": {"TensorFactory TensorGroup TensorGroupPattern flatten": _ENGINE},
    "monarch.parallel.pipelining.runtime": {
        "add_sys_path_impl": "sources travel with functions that are sent by value",
        "build_loss_list build_module_chunk build_optimizer_chunk": _STAGES,
        "build_pp_loss_layer generate_schedule get_loss_impl get_loss_udf": _STAGES,
        "optimizer_step optimizer_zero_grad run_backward_impl run_backward_udf": _STAGES,
        "run_forward_impl run_forward_udf": _STAGES,
    },
    "monarch.python_local_mesh": {
        "Context HostConnected PythonLocalContext": _SUPERVISOR,
        "fake_call": _ENGINE,
    },
    "monarch.simulator.profiling": {
        "FakeRuntimeProfiler ProfilingWorker": _TIMES,
        "DTensorRef HashableTreeSpec TensorFactory TensorGroup": _SIMULATED,
        "expand_func_path get_free_port hashable_tensor_flatten": _SIMULATED,
    },
    "monarch.simulator.simulator": {
        "FakeRuntimeProfiler": _TIMES,
        "DTensorRef FakeTensorTracker MemoryViewer": _SIMULATED,
        "MessageResult MockController Simulator Worker WorkerGroup": _SIMULATED,
        "clean_name get_fake_tensor get_ids iter_ranks": _SIMULATED,
        "ActorAddr LogMessage": _SIMULATED,
    },
    "monarch.simulator.task": {
        "META_VAL": "use set_meta()",
        "WorkerTaskManager": _SIMULATED,
    },
    "monarch._rust_bindings.monarch_hyperactor.actor": {
        "MethodSpecifier PythonMessage PythonMessageKind": _WIRE,
        "PortProtocol": "annotate with monarch.actor.Port",
    },
    "monarch._rust_bindings.monarch_hyperactor.handle": {"Handle": _TASKS},
    "monarch._rust_bindings.monarch_hyperactor.mailbox": {
        "Mailbox OncePortRef PortId PortRef": _WIRE,
    },
    "monarch._rust_bindings.monarch_hyperactor.pickle": {"PendingMessage": _CODEC},
    "monarch._rust_bindings.monarch_hyperactor.proc": {
        "Proc init_proc": "use monarch.actor.this_proc() and context()",
    },
    "monarch._rust_bindings.monarch_hyperactor.pytokio": {
        "Handle Shared is_tokio_thread": _TASKS,
    },
    "monarch._rust_bindings.monarch_hyperactor.telemetry": {
        "PySpan forward_to_tracing": _SPANS,
    },
}
for _alias, (_target, _) in DEPRECATED.items():
    INTERNAL[_alias] = INTERNAL.get(_target, {})

#: Whole modules of the reference without a counterpart, with all modules below them.
INTERNAL_MODULES = {
    "monarch._src.actor.code_sync": "use HostMesh.sync_workspace()",
    "monarch._src.actor.mpsc": _TASKS,
    "monarch._src.actor.proc_launcher": _LAUNCH,
    "monarch._src.actor.python_extension_methods": _NATIVE,
    "monarch._src.actor.source_loader": "sources travel with functions that are sent by value",
    "monarch._src.actor.testing": _NATIVE,
    "monarch._src.actor.waker": _TASKS,
    "monarch._rust_bindings.monarch_extension": _NATIVE,
    "monarch._rust_bindings.monarch_hyperactor.actor_mesh": _MESHES,
    "monarch._rust_bindings.monarch_hyperactor.logging": _LOGS,
    "monarch._rust_bindings.monarch_messages": _TENSORS,
    "monarch.remote": _TENSORS,
}

#: The packages that contain the modules of the tables.
PACKAGES = {
    ".".join(parts[:length])
    for parts in (path.split(".") for path in (*PATHS, *SAME))
    if parts[1]
    in {"_src", "_rust_bindings", "builtins", "common", "parallel", "simulator", "timer"}
    for length in range(2, len(parts))
}

EXTRAS = {"torch": "torch"}
"""Packages that homes import and that may be missing, with the extra that installs each."""

IN_PAR = False
"""Whether the program runs from a single-file archive. This distribution never does."""


def has_tensor_engine() -> bool:
    """Return whether distributed tensors are available: whether torch is installed."""
    from importlib.util import find_spec

    return find_spec("torch") is not None


def homes(module: str) -> dict[str, str]:
    """Return ``{name: "home:attribute"}`` for an old module.

    >>> homes("monarch._src.actor.concurrent")
    {'concurrent_endpoint': 'monarch.actor:concurrent_endpoint'}
    """
    found: dict[str, str] = {}
    for home, names in PATHS.get(module, {}).items():
        for entry in names.split():
            name, _, attribute = entry.partition("=")
            found[name] = f"{home}:{attribute or name}"
    return found


def advice(module: str) -> dict[str, str]:
    """Return ``{name: replacement}`` for the names of a module that have no counterpart."""
    return {
        name: instead
        for names, instead in INTERNAL.get(module, {}).items()
        for name in names.split()
    }


def resolve(home: str) -> Any:
    """Return the object that ``"module:attribute"`` or ``"module"`` names; import the module.

    Raise `ImportError` that names an extra if the module needs a package of `EXTRAS` that is not
    installed.
    """
    module, _, attribute = home.partition(":")
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        raise ImportError(
            f"{attribute or module} needs {error.name}, which is not installed: "
            f"pip install 'pymonarch[{EXTRAS[error.name]}]'",
            name=error.name,
        ) from error
    return attrgetter(attribute)(loaded) if attribute else loaded


def install() -> None:
    """Make old paths importable in this process. A second call has no effect."""
    if not any(isinstance(finder, _OldPaths) for finder in sys.meta_path):
        sys.meta_path.append(_OldPaths())


class _OldPaths:
    """The finder and loader of the modules of the tables.

    It has no base class of `importlib.abc`, whose import would take longer than that of `monarch`.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if _is_old(fullname):
            return importlib.machinery.ModuleSpec(
                fullname, cast("Loader", self), origin=__file__, is_package=fullname in PACKAGES
            )
        if instead := INTERNAL_MODULES.get(fullname):
            raise ModuleNotFoundError(_no_counterpart(fullname, instead), name=fullname)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """Return None: the import system then creates an ordinary module."""

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        if name in DEPRECATED:
            warnings.warn(
                f"{name} is deprecated, please import from {DEPRECATED[name][1]} instead.",
                DeprecationWarning,
                stacklevel=2,  # the import system's own frames do not count
            )
        if name in SAME:
            # The import system returns the entry of sys.modules after the module has run.
            sys.modules[name] = resolve(SAME[name])
            return
        served, internal = homes(name), advice(name)

        def __getattr__(attribute: str) -> Any:  # noqa: N807 - of the module
            if home := served.get(attribute):
                found = resolve(home)
                if getattr(found, "__module__", None) == name:
                    # Pickles name this module. Objects are pickled and unpickled often.
                    module.__dict__[attribute] = found
                return found
            if instead := internal.get(attribute):
                raise ImportError(_no_counterpart(f"{name}.{attribute}", instead), name=name)
            submodule = f"{name}.{attribute}"
            if _is_old(submodule) or submodule in INTERNAL_MODULES:
                return importlib.import_module(submodule)
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")

        module.__doc__ = f"Names that used to live in `{name}`; see `monarch._compat`."
        module.__dict__.update(
            __all__=sorted(served), __dir__=lambda: sorted(served), __getattr__=__getattr__
        )

    def get_code(self, fullname: str) -> CodeType | None:
        program = PROGRAMS.get(fullname)
        if program is None:
            return None
        # Children of multiprocessing run it under another name, to prepare their `__main__`.
        run = "if __name__ == '__main__': sys.exit(main())"
        return compile(f"import sys\nfrom {program} import main\n{run}", fullname, "exec")

    def get_source(self, fullname: str) -> str | None:
        return None

    def is_package(self, fullname: str) -> bool:
        return fullname in PACKAGES


def _is_old(module: str) -> bool:
    return module in PATHS or module in PACKAGES or module in SAME


def _no_counterpart(what: str, instead: str) -> str:
    return f"{what} has no counterpart in pymonarch: {instead}"
