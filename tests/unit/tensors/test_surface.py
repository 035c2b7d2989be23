"""The names of the tensor engine are those of the reference, with their parameters and members."""

# ruff: noqa: E501 - the rows of the table

from __future__ import annotations

import enum
import importlib
import inspect
from typing import Any

import pytest

pytest.importorskip("torch")

from monarch import _compat
from tests.signatures import VARIABLE, check

pytestmark = pytest.mark.torch

NAMES = {
    "monarch": """
        Future OpaqueRef RemoteProcessGroup Simulator Stream Tensor builtins
        call_on_shard_and_fetch coalescing fetch_shard function_resolvers get_active_mesh
        get_active_stream grad_function grad_generator inspect mast_reserve no_mesh reduce
        reduce_ remote set_meta show slice_mesh timer to_mesh world_mesh
    """,
    "monarch._testing": """
        Client DeviceException DeviceMesh MockController NDSlice ProcMesh ProcessJob
        RemoteException TestingContext mock_mesh spawn_tensor_engine
    """,
    "monarch.builtins": "log_remote set_logging_level_remote",
    "monarch.builtins.log": "log_remote logger remote set_logging_level_remote",
    "monarch.builtins.random": """
        get_rng_state_all_cuda_remote get_rng_state_remote manual_seed_all_cuda_remote
        manual_seed_cuda_remote random_seed_remote remote seed_remote set_manual_seed_remote
        set_rng_state_all_cuda_remote set_rng_state_remote
    """,
    "monarch.cached_remote_function": """
        DummyProcessGroup RemoteAutogradFunction RemoteProcessGroup
        SingleControllerProcessGroupWrapper backward_remote_fn forward_remote_fn manage_grads
        remote remote_autograd_function worker_autograd_function_backward
        worker_autograd_function_forward
    """,
    "monarch.common._coalescing": """
        CacheEntry CoalescingState InputChecker Tensor TensorGroup TensorGroupPattern coalescing
        compile fake_call flatten hashable_tensor_flatten is_active is_recording
    """,
    "monarch.common.borrows": "Borrow StorageAliases",
    "monarch.common.device_mesh": """
        ActivateGuard DeviceMesh DeviceMeshInfo DeviceMeshStatus MeshSliceTensor MeshTrait
        NDSlice Referenceable RemoteProcessGroup Shape Stream Tensor
        activate_first_context_manager get_active_mesh slice_mesh tensor_to_table to_mesh
    """,
    "monarch.common.function": """
        ResolvableFromCloudpickle ResolvableFunction ResolvableFunctionFromPath
        function_to_import_path maybe_resolvable_function resolvable_function
    """,
    "monarch.common.future": "Future RemoteException TTL stream",
    "monarch.common.invocation": "ActorAddr DeviceException Invocation RemoteException",
    "monarch.common.opaque_ref": "OpaqueRef wrap_create",
    "monarch.common.pipe": """
        FakePipe Pipe Referenceable Remote ResolvableFunctionFromPath Tensor create_pipe
        dtensor_check fake_call flatten remote remote_generator
    """,
    "monarch.common.remote": """
        DummyProcessGroup Endpoint Extent Future InputChecker OldFuture OncePortRef PortRef
        Remote RemoteIfy RemoteImpl RemoteProcessGroup ResolvableFunction
        ResolvableFunctionFromPath Shape TensorGroup TensorPlaceholder call_on_shard_and_fetch
        dtensor_check dtensor_dispatch fake_call flatten hashable_tensor_flatten remote
        remote_identity resolvable_function
    """,
    "monarch.common.stream": """
        Borrow Referenceable Stream StreamRef activate_first_context_manager fake_call
        get_active_stream
    """,
    "monarch.common.tensor": """
        BaseTensor DropLocation HasDeviceMesh InputChecker Invocation MeshSliceTensor NDSlice
        Referenceable ResolvableFunction ResolvableFunctionFromPath StorageAliases Stream Tensor
        check_torch_version dtensor_check dtensor_dispatch fake_call flatten
        get_built_pytorch_version handle_lift_fresh_dispatch reduce reduce_
    """,
    "monarch.fetch": "Future call_on_shard_and_fetch fetch_shard inspect remote_identity show",
    "monarch.memory": "dump_memory_snapshot record_memory_history remote",
    "monarch.mesh_controller": """
        ActorAddr Channel Client Controller DeviceException DeviceMesh InputChecker Instance
        LogMessage MeshClient MessageResult MethodSpecifier NDSlice OldFuture OncePortRef
        PdbWrapper PendingMessage PicklingState Point PortId PortRef PythonMessageKind
        ReadWrapper Ref RemoteException ResolvableFunction SendResultOfActorCall Stream
        StreamRef TController Tensor UnflattenArg WriteWrapper actor_rref context
        create_actor_message_kind dtensor_check flatten spawn_tensor_engine
    """,
    "monarch.notebook": """
        Context ControllerImporterServer DeviceMesh HostConnected MastJob cleanup connect
        get_mast_notebook_jobs get_message_queue host_main initialize_logging launch_mast
        list_mast_jobs log mast_get_jobs mast_job_is_valid mast_mesh register_importer remote
        reserve reserve_torchx world_mesh
    """,
    "monarch.opaque_module": """
        OpaqueModule OpaqueObject OpaqueRef TensorFactory TensorGroup TensorGroupPattern
        call_on_shard_and_fetch flatten remote
    """,
    "monarch.opaque_object": """
        OpaqueObject OpaqueRef ResolvableFunction call_on_shard_and_fetch opaque_method remote
        resolvable_function
    """,
    "monarch.parallel": "PipelineParallelism get_parameter_udf",
    "monarch.parallel.pipelining.runtime": """
        DeviceMesh OpaqueModule OpaqueRef PipelineParallelism Stream Tensor add_sys_path_impl
        build_loss_list build_module_chunk build_optimizer_chunk build_pp_loss_layer fetch_shard
        generate_schedule get_loss_impl get_loss_udf get_parameter get_parameter_udf
        optimizer_step optimizer_zero_grad remote run_backward_impl run_backward_udf
        run_forward_impl run_forward_udf
    """,
    "monarch.profiler": """
        ControllerRemoteClass Schedule WorkerRecordFunction WorkerRemoteClass profile
        record_function remote
    """,
    "monarch.python_local_mesh": """
        Context DeviceException HostConnected PythonLocalContext RemoteException fake_call
        python_local_mesh world_mesh
    """,
    "monarch.random": "State Tensor get_state make_deterministic new_state remote set_state",
    "monarch.remote_class": "ControllerRemoteClass WorkerRemoteClass remote",
    "monarch.safe_torch": "torch",
    "monarch.simulator.interface": """
        DeviceMesh IRGraph NDSlice Simulator SimulatorBackendMode SimulatorInterface
        SimulatorTraceMode
    """,
    "monarch.simulator.ir": "Command IRGraph",
    "monarch.simulator.profiling": """
        CommandHistory DTensorRef FakeRuntimeProfiler HashableTreeSpec ProfilingWorker
        RuntimeEstimator RuntimeProfiler TensorFactory TensorGroup TimingType expand_func_path
        get_free_port hashable_tensor_flatten profile_function resolvable_function
    """,
    "monarch.simulator.simulator": """
        ActorAddr Borrow CommandHistory DTensorRef DeviceException DeviceMesh EventTask
        FakeRuntimeProfiler FakeTensorTracker IRGraph LogMessage MemoryViewer MessageResult
        MockController NDSlice ResolvableFunction ResolvableFunctionFromPath RuntimeEstimator
        RuntimeProfiler Simulator SimulatorBackendMode SimulatorController SimulatorInterface
        SimulatorTraceMode Task TraceEvent Worker WorkerGroup clean_name compress_workers_range
        dump_memory_trace dump_process_name dump_thread_event_trace file_path_with_iter
        get_fake_tensor get_ids iter_ranks upload_trace
    """,
    "monarch.simulator.task": "Borrow EventTask META_VAL Task TaskState WorkerTaskManager",
    "monarch.timer": """
        ExecutionTimer execution_timer_start execution_timer_stop get_execution_timer_average_ms
        get_latest_timer_measurement
    """,
    "monarch.timer.execution_timer": """
        ExecutionTimer execution_timer_start execution_timer_stop get_execution_timer_average_ms
        get_execution_timer_summary get_latest_timer_measurement get_time_perfcounter
    """,
}
SURFACE = {
    "monarch": {
        "Future": ("client", "add_callback done exception result"),
        "OpaqueRef": ("value=", "check_worker value"),
        "RemoteProcessGroup": (
            "dims device_mesh",
            "delete_ref drop dropped ensure_split_comm_remotely size",
        ),
        "Simulator": (
            "hosts gpus * simulate_mode= trace_mode= upload_trace= trace_path= command_history_path= group_workers= build_ir=",
            "",
        ),
        "Stream": ("name _default=", "activate borrow"),
        "Tensor": ("fake mesh stream", "delete_ref drop dropped reduce reduce_ slice_mesh to_mesh"),
        "call_on_shard_and_fetch": ("remote *args shard= **kwargs", ""),
        "coalescing": ("", ""),
        "fetch_shard": ("obj shard= **kwargs", ""),
        "get_active_mesh": ("", ""),
        "get_active_stream": ("", ""),
        "inspect": ("obj shard= **kwargs", ""),
        "mast_reserve": (
            "hosts torchx_workspace_path= nfs_workspace_dir= oilfs_workspace_dir= workspace_dir= conda_dir= locality_constraints= rm_attribution= running_timeout_sec= additional_scheduler_args=",
            "",
        ),
        "reduce": ("tensors dims reduction= scatter= mesh= _inplace=", ""),
        "reduce_": ("tensors dims reduction= scatter= mesh=", ""),
        "remote": ("function= * propagate=", ""),
        "set_meta": ("new_value", ""),
        "show": ("obj shard= **kwargs", ""),
        "slice_mesh": ("tensors **kwargs", ""),
        "to_mesh": ("tensors mesh stream=", ""),
    },
    "monarch._testing": {
        "DeviceException": ("exception frames source_actor_id message", ""),
        "DeviceMesh": (
            "client processes names mesh_name=",
            "activate deactivate define_remotely delete_ref process_group process_idx rank ranks rotate stack to_table to_tensor",
        ),
        "NDSlice": (
            "* offset sizes strides",
            "coordinates from_list get index ndim nditem new_row_major offset sizes strides",
        ),
        "RemoteException": (
            "seq exception controller_frame_index controller_frames worker_frames source_actor_id message=",
            "",
        ),
        "TestingContext": ("", "local_device_mesh local_engine_on_proc_mesh"),
        "mock_mesh": ("hosts gpus", ""),
        "spawn_tensor_engine": ("proc_mesh", ""),
    },
    "monarch.cached_remote_function": {
        "RemoteAutogradFunction": ("*args **kwargs", "backward forward"),
        "remote_autograd_function": ("target_class name=", ""),
    },
    "monarch.common._coalescing": {
        "compile": ("fn= verify=", ""),
    },
    "monarch.common.borrows": {
        "Borrow": ("id aliases mesh", "drop traceback_string"),
    },
    "monarch.common.device_mesh": {
        "MeshSliceTensor": ("tensor slicing", "to_mesh"),
        "Shape": (
            "labels slice",
            "at coordinates extent from_bytes index labels ndslice ranks region select unity",
        ),
    },
    "monarch.common.function": {
        "ResolvableFromCloudpickle": ("data", "data resolve"),
        "ResolvableFunction": ("*args **kwargs", "resolve"),
        "ResolvableFunctionFromPath": ("path", "path resolve"),
        "maybe_resolvable_function": ("arg", ""),
        "resolvable_function": ("arg", ""),
    },
    "monarch.common.future": {
        "stream": ("futures timeout=", ""),
    },
    "monarch.common.invocation": {
        "ActorAddr": (
            "* addr proc_name actor_name",
            "actor_name addr from_string is_root label pid proc_id proc_label proc_name uid",
        ),
    },
    "monarch.common.pipe": {
        "FakePipe": ("", "recv send"),
        "Pipe": ("fn max_messages args kwargs", "delete_ref ranks recv send sizes"),
        "Remote": ("remote", "broadcast call call_one choose rref stream"),
        "create_pipe": ("fn *args max_messages= **kwargs", ""),
        "remote_generator": ("path max_messages=", ""),
    },
    "monarch.common.remote": {
        "Endpoint": ("*args **kwargs", "broadcast call call_one choose rref stream"),
        "Extent": ("labels sizes", "from_bytes keys labels nelements region sizes"),
    },
    "monarch.memory": {
        "dump_memory_snapshot": ("*args **kwargs", ""),
    },
    "monarch.mesh_controller": {
        "context": ("", ""),
    },
    "monarch.opaque_module": {
        "OpaqueModule": ("*args **kwargs", "call_method parameters"),
        "OpaqueObject": (
            "constructor *args **kwargs",
            "call_method call_method_on_shard_and_fetch",
        ),
    },
    "monarch.opaque_object": {
        "opaque_method": ("fn", ""),
    },
    "monarch.parallel": {
        "PipelineParallelism": (
            "meshes stages compute_stream p2p_stream schedule= batch_size= microbatch_size= loss_fn= loss_list=",
            "configure_optimizers copy_params_to_new_model dispatch_pp_schedule generate_pipeline_ir_schedule initialize run run_action split_inputs_outputs stage_to_rank",
        ),
    },
    "monarch.parallel.pipelining.runtime": {
        "get_parameter": ("module_ref param_name param_shape", ""),
    },
    "monarch.profiler": {
        "ControllerRemoteClass": ("cls_path *args **kwargs", "remote_method"),
        "Schedule": (
            "wait warmup active repeat= skip_first=",
            "active repeat skip_first wait warmup",
        ),
        "WorkerRecordFunction": ("*args **kwargs", ""),
        "WorkerRemoteClass": ("", "remote_del remote_init remote_method"),
        "profile": ("*args **kwargs", "PATH_KEY step"),
        "record_function": ("name args=", ""),
    },
    "monarch.python_local_mesh": {
        "python_local_mesh": ("* gpus= hosts=", ""),
    },
    "monarch.random": {
        "State": ("cpu cuda", "cpu cuda"),
        "get_state": ("", ""),
        "new_state": ("seed", ""),
    },
    "monarch.simulator.interface": {
        "IRGraph": (
            "",
            "add_borrow add_sendtensor convert_devices_to_meshes delete_tensor export_borrows_csv export_command_types export_dag_json export_dag_json_timed export_data_csv export_data_timeline_csv export_memory_viz export_sendtensors_csv import_timing insert_node remove_dag_item_type update_tensor",
        ),
        "SimulatorBackendMode": (
            "value",
            "COMMAND_HISTORY EVERYTHING SIMULATE SIMULATE_WITH_REPORT_ONLY command_history_enabled simulation_enabled",
        ),
        "SimulatorInterface": ("mesh ctrl ir", "display export_ir upload"),
        "SimulatorTraceMode": (
            "value",
            "CONTROLLER_TRACE_ONLY EVERYTHING STREAM_ONLY controller_enabled stream_enabled",
        ),
    },
    "monarch.simulator.ir": {
        "Command": (
            "worker_rank stream_name command_id command_name devices control_dependencies traceback duration=",
            "",
        ),
    },
    "monarch.simulator.profiling": {
        "RuntimeProfiler": ("world_size= port=", "profile_cmd"),
        "profile_function": ("func_path shapes", ""),
        "CommandHistory": (
            "world_size * maxlen= file_path=",
            "convert_command convert_msg dump load record step",
        ),
        "RuntimeEstimator": ("", "get_runtime set_custom_timing"),
        "TimingType": ("value", "CALL_FUNCTION KERNEL_LAUNCH REDUCE SEND_TENSOR WAIT_EVENT"),
    },
    "monarch.simulator.simulator": {
        "SimulatorController": (
            "world_size gpu_per_host * simulate_mode= trace_mode= upload_trace= trace_path= command_history_path= group_workers= ir=",
            "Exit cleanup_simulation gpu_per_host next_message send step",
        ),
        "Borrow": ("ident tensor_src_id tensor_dst_id from_stream to_stream", ""),
        "EventTask": (
            "recorded_task event_stream event_stream_name wait_stream wait_stream_name start_time command_id runtime= borrow= traceback=",
            "clone",
        ),
        "Task": (
            "inputs outputs command_id start_time runtime meta collectives= waits= traceback=",
            "clone maybe_execute maybe_finish maybe_set_ready state",
        ),
        "TraceEvent": ("start runtime meta command_id traceback", ""),
        "compress_workers_range": ("workers", ""),
        "dump_memory_trace": ("trace * pid memory ts name", ""),
        "dump_process_name": ("trace * pid name", ""),
        "dump_thread_event_trace": ("trace events * pid tid name", ""),
        "file_path_with_iter": ("file_path iter_count", ""),
        "upload_trace": ("file_path", ""),
    },
    "monarch.timer": {
        "ExecutionTimer": ("", "get_latest_measurement reset start stop summary time"),
        "execution_timer_start": ("name= use_cpu=", ""),
        "execution_timer_stop": ("name= use_cpu=", ""),
        "get_execution_timer_average_ms": ("name=", ""),
        "get_latest_timer_measurement": ("name=", ""),
    },
    "monarch.timer.execution_timer": {
        "get_execution_timer_summary": ("", ""),
        "get_time_perfcounter": ("", ""),
    },
}

#: Parameters that differ, with the reason.
OTHER_PARAMETERS = {
    "Borrow": "Stream.borrow() makes it",
    "DeviceException": "no process raises it; it is there to be caught",
    "Remote": "remote() makes it",
    "RemoteException": "there is one class of this name, the one that meshes raise",
    "Tensor": "operations make it",
    "WorkerRecordFunction": "record_function() makes it",
    "dump_memory_snapshot": "it says that dir_snapshots= is missing, as Python does",
    "mast_reserve": "it only raises an error",
}

#: Members without a counterpart, which say so.
WITHOUT = {
    "CommandHistory": "convert_command convert_msg",
    "DeviceMesh": "define_remotely delete_ref",
    "IRGraph": "add_borrow add_sendtensor convert_devices_to_meshes delete_tensor update_tensor",
    "RemoteProcessGroup": "delete_ref ensure_split_comm_remotely",
    "SimulatorController": "Exit next_message send",
    "Tensor": "delete_ref",
}

#: Attributes of instances.
ATTRIBUTES = {"RemoteProcessGroup": "dropped", "SimulatorController": "gpu_per_host"}


@pytest.mark.parametrize("module", NAMES)
def test_each_name_is_there_or_says_what_to_use(module: str) -> None:
    loaded = importlib.import_module(module)
    for name in NAMES[module].split():
        if name in _compat.advice(module):
            with pytest.raises(ImportError, match=f"{name} has no counterpart in pymonarch: ."):
                getattr(loaded, name)
        else:
            assert getattr(loaded, name) is not None


@pytest.mark.parametrize("module", SURFACE)
def test_each_call_of_the_reference_is_possible(module: str) -> None:
    for name, (told, _) in SURFACE[module].items():
        found = getattr(importlib.import_module(module), name)
        if name in OTHER_PARAMETERS or isinstance(found, enum.EnumMeta):
            continue  # Python itself has changed the parameters of an enum
        ours = dict(inspect.signature(found).parameters)
        variable = {VARIABLE[it.kind]: it.name for it in ours.values() if it.kind in VARIABLE}
        # The name of "**kwargs" is no part of a call, nor are names that "*args" takes.
        check(name, [renamed(word, variable) for word in told.split()], ours)


def renamed(word: str, variable: dict[str, str]) -> str:
    """Return `*args` or `**kwargs` under the name that it has here."""
    stars = word[: len(word) - len(word.lstrip("*"))]
    return stars + variable.get(stars, word[len(stars) :]) if len(word) > len(stars) > 0 else word


@pytest.mark.parametrize("module", SURFACE)
def test_each_member_is_there_or_says_what_to_use(module: str) -> None:
    for name, (_, members) in SURFACE[module].items():
        found: Any = getattr(importlib.import_module(module), name)
        without = WITHOUT.get(name, "").split()
        for member in members.split():
            if member in without:
                with pytest.raises(AttributeError, match=f"{name}.{member} has no counterpart"):
                    getattr(found, member)
            elif member not in ATTRIBUTES.get(name, "").split():
                assert hasattr(found, member), f"{name}.{member}"
