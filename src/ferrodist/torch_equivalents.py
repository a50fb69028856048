"""The equivalents of torch.distributed's names, for errors about missing attributes of ferrodist's packages."""

_RESULT = "which returns its result (out=tensor writes it in place)"

_HINTS = {
    "all_gather_coalesced": "use ferrodist.all_gather in ferrodist.coalesce",
    "all_gather_into_tensor": f"use ferrodist.all_gather, {_RESULT}",
    "all_gather_single": f"use ferrodist.all_gather, {_RESULT}",
    "all_reduce": f"use ferrodist.allreduce, {_RESULT}",
    "all_reduce_coalesced": "use ferrodist.async_allreduce in ferrodist.coalesce",
    "all_to_all_single": "use ferrodist.all_to_all with one tensor, or ferrodist.all_to_all_single_uneven with counts;"
    " both return their result",
    "async_save": "use ferrodist.checkpoint.AsyncCheckpointer",
    "batch_isend_irecv": "use ferrodist.batch with Send and Recv, which waits for them",
    "broadcast_object_list": "use ferrodist.broadcast_object, which takes one value and returns the root's",
    "ColwiseParallel": "use ferrodist.ColumnParallel",
    "default_pg_timeout": "use ferrodist.DEFAULT_COLLECTIVE_TIMEOUT, in seconds",
    "distribute_module": "use ferrodist.parallelize",
    "distribute_tensor": "use ferrodist.distribute",
    "DistributedDataParallel": "use ferrodist.DDP",
    "DistributedSampler": "use torch's, after ferrodist.init_process_group(torch_default=True) or with num_replicas="
    " and rank=",
    "fully_shard": "use ferrodist.FSDP",
    "FullyShardedDataParallel": "use ferrodist.FSDP",
    "gather_single": f"use ferrodist.gather, {_RESULT}",
    "get_backend": "look at the class of ferrodist.default_group(): each kind of group has its own",
    "get_default_group": "use ferrodist.default_group()",
    "get_global_rank": "use to_global of a sub-group: ferrodist.SubBackend.to_global",
    "get_group_rank": "use to_local of a sub-group: ferrodist.SubBackend.to_local",
    "get_process_group_ranks": "use the property members of a sub-group: ferrodist.SubBackend.members",
    "get_rank": "use the property rank of a group: ferrodist.default_group().rank",
    "get_world_size": "use the property world_size of a group: ferrodist.default_group().world_size",
    "group": "use ferrodist.default_group() for group.WORLD",
    "GroupMember": "use ferrodist.NonMemberGroup for GroupMember.NON_GROUP_MEMBER, and the property is_member",
    "HuggingFaceStorageReader": "use ferrodist.checkpoint.load_hugging_face",
    "init_device_mesh": "use ferrodist.DeviceMesh(group, shape, axis_names)",
    "init_rpc": "use ferrodist.rpc.RpcContext",
    "irecv": "use ferrodist.recv or ferrodist.recv_into, which wait, or ferrodist.batch for several messages at once",
    "is_available": "ferrodist is there where it can be imported; ferrodist.is_native_available() asks for the engine",
    "isend": "use ferrodist.send, which waits until the tensor may be changed, or ferrodist.batch for several"
    " messages at once",
    "Join": "use ferrodist.DDP.join",
    "load": "use ferrodist.checkpoint.load_distributed",
    "new_subgroups": "use ferrodist.DeviceMesh, whose axes are groups, or ferrodist.new_group",
    "new_subgroups_by_enumeration": "use ferrodist.DeviceMesh, whose axes are groups, or ferrodist.new_group",
    "P2POp": "use ferrodist.Send and ferrodist.Recv in ferrodist.batch",
    "parallelize_module": "use ferrodist.parallelize",
    "pipeline": "use ferrodist.split_model, and ferrodist.Pipeline for its stages",
    "ProcessGroup": "use ferrodist.Backend",
    "recv_object_list": "use ferrodist.recv_object, which returns the value",
    "reduce_op": "use ferrodist.ReduceOp",
    "reduce_scatter_single": f"use ferrodist.reduce_scatter, {_RESULT}, or ferrodist.reduce_scatter_tensor",
    "register_fsdp_forward_method": "use ferrodist.register_forward_method, after ferrodist.FSDP",
    "remote": "use ferrodist.rpc.RpcAgent.remote",
    "RowwiseParallel": "use ferrodist.RowParallel",
    "rpc_async": "use ferrodist.rpc.RpcAgent.rpc_async",
    "rpc_sync": "use ferrodist.rpc.RpcAgent.rpc_sync",
    "RRef": "use ferrodist.rpc.RRef",
    "save": "use ferrodist.checkpoint.save_distributed",
    "scatter_object_list": "use ferrodist.scatter_object, which returns this rank's value",
    "scatter_single": f"use ferrodist.scatter, {_RESULT}",
    "send_object_list": "use ferrodist.send_object, which takes one value",
    "shrink_group": "use ferrodist.new_group with the ranks that are left",
    "shutdown": "use ferrodist.rpc.RpcAgent.close, or the end of ferrodist.rpc.RpcContext",
    "split_group": "use ferrodist.new_group",
    "SyncBatchNorm": "use ferrodist.SyncBatchNorm2d (or 1d, 3d), or ferrodist.convert_sync_batchnorm for a whole model",
    "Work": "use ferrodist.PendingCollective",
}


def missing_attribute(module: str, name: str) -> AttributeError:
    """The error for a name that a module doesn't have, with the equivalent of a name of torch.distributed's."""
    equivalent = _HINTS.get(name)
    hint = f": {equivalent} (docs/from-torch.md has torch.distributed's other names)" if equivalent else ""
    return AttributeError(f"module {module!r} has no attribute {name!r}{hint}", name=name)
