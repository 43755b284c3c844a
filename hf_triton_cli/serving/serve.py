# SPDX-License-Identifier: Apache-2.0
"""`hf-triton serve`: a tritonserver in the foreground; without a repository it serves the demo model."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource

from hf_triton.errors import ServerError, SettingsError
from hf_triton.folders.doors import door_repository, streamed_folder
from hf_triton.folders.ensembles import misfits
from hf_triton.folders.folders import defects, ensemble_steps, guess_reason, model_folders, with_remedy
from hf_triton.folders.model_folder import with_task
from hf_triton.folders.served_repository import served_repository
from hf_triton.folders.sources import fetch_models, is_repository, model_repository, split_flags
from hf_triton.protocol.names import DOOR_SUFFIX
from hf_triton.server import (
    ADMIN_HEADER,
    GRPC_RESTRICTED,
    HTTP_RESTRICTED,
    STOP_GRACE_S,
    STOP_SIGNALS,
    TritonServer,
    check_flags,
    flag_value,
    lock_flags,
    restricted_protocol_headers,
)
from hf_triton_cli.exit_codes import exit_code
from hf_triton_cli.progress import show_download
from hf_triton_cli.say import say
from hf_triton_cli.serving.addresses import PORT, check_host, check_ports
from hf_triton_cli.serving.board import Board
from hf_triton_cli.serving.examples import loaded_model, model_on_demand, ready_text
from hf_triton_cli.serving.gateway_options import BESIDE_TRITON, gateway_options, read_config
from hf_triton_cli.serving.gateway_process import GatewayProcess
from hf_triton_cli.serving.model_states import ModelStates
from hf_triton_cli.serving.server_log import ServerLog
from hf_triton_cli.shared_options import SET, TASK
from hf_triton_cli.typed import as_typed
from hf_triton_gateway.gateway_config import GatewayConfig

DEFAULT_OPENAI_PORT: Final = GatewayConfig.model_fields["port"].default
EXPLICIT: Final = "--model-control-mode=explicit"
LOAD: Final = "--load-model="
OWN_FLAGS: Final[Mapping[str, str]] = {
    **{f"--{port}-port": f"--{port}-port" for port in ("http", "grpc", "metrics")},
    **{f"--{port}-address": "--host" for port in ("http", "grpc", "metrics")},
    "--exit-on-error": "--exit-on-error",
    "--model-repository": "a model repository",
}
"""tritonserver's flags that have an option of their own."""
TLS: Final = "--grpc-use-ssl"
MUTUAL_TLS: Final = "--grpc-use-ssl-mutual"
TRUE: Final = ("true", "True", "TRUE", "1")
"""What tritonserver reads as true."""
ADMIN_KEY: Final = re.compile(r"[A-Za-z0-9+/_-]{16,256}={0,2}")
EXAMPLES: Final = """\b
Examples:
  hf-triton serve Qwen/Qwen3-0.6B --set max_output_length=200
  hf-triton serve model_repository -- --model-control-mode=explicit
"""


class _ServeCommand(click.Command):
    """Says of an option that it does not know where tritonserver's stand."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise click.UsageError(f"{error.format_message()} Flags of tritonserver follow behind --.", ctx) from None


@click.command(cls=_ServeCommand, epilog=EXAMPLES)
@click.argument("what", nargs=-1, metavar="[MODEL|FOLDER]... [-- TRITON FLAGS]")
@click.option("--stream", is_flag=True, help="Checkpoints' folders stream themselves, and refuse /infer.")
@TASK
@SET
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 for all.")
@click.option("--http-port", type=PORT, default=8000, show_default=True)
@click.option("--grpc-port", type=PORT, default=8001, show_default=True)
@click.option("--metrics-port", type=PORT, default=8002, show_default=True)
@click.option("--openai-port", type=PORT, default=DEFAULT_OPENAI_PORT, show_default=True)
@click.option("--openai/--no-openai", default=True, show_default=True, help="Run a gateway that speaks OpenAI's API.")
@click.option(
    "--load-timeout",
    type=click.FloatRange(1),
    default=7200,
    show_default=True,
    help="Seconds for loading, downloads included.",
)
@click.option(
    "--doors/--no-doors",
    default=True,
    show_default=True,
    help="Add a stream door, NAME_stream, beside each folder that does not stream itself.",
)
@click.option(
    "--admin-key-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="File with the key that Triton asks for to load models, list them, share memory, trace and log, over HTTP "
    f"(header {ADMIN_HEADER}) and gRPC (triton-grpc-protocol-{ADMIN_HEADER}); by default it asks for none.",
)
@click.option("--exit-on-error", is_flag=True, help="Exit if a folder cannot be loaded, instead of serving the others.")
@click.option("--verbose", is_flag=True, help="Show the log of Triton and the gateway here; else it goes to a file.")
@gateway_options(BESIDE_TRITON)
def serve(
    what: Sequence[str],
    stream: bool,
    task: str | None,
    settings: Mapping[str, str],
    host: str,
    http_port: int,
    grpc_port: int,
    metrics_port: int,
    openai_port: int,
    openai: bool,
    load_timeout: float,
    doors: bool,
    admin_key_file: Path | None,
    exit_on_error: bool,
    verbose: bool,
    **gateway_values: Any,
) -> None:
    """Serve models: names on the Hub, paths of checkpoints, model folders, or a model repository.

    Without any, serve the small demo model that comes with hf_triton. Nothing is written but a log, and to the Hub's
    cache. Flags of tritonserver itself follow behind `--`.
    """
    what, flags = split_flags(what)
    settings = with_task(settings, task)
    _check_own_flags(flags)
    if not what and (settings or stream):
        raise click.UsageError("--set, --task and --stream are for models: name one")
    check_host(host)
    ports = {"--http-port": http_port, "--grpc-port": grpc_port, "--metrics-port": metrics_port}
    check_ports(ports | ({"--openai-port": openai_port} if openai else {}))
    if not openai:
        _check_no_gateway_options()
    check_flags(flags)
    if admin_key_file is not None:
        flags = [*flags, *_lock(flags, admin_key_file)]
    on_demand = bool(gateway_values["on_demand"])
    if on_demand and EXPLICIT not in flags:
        flags = [*flags, EXPLICIT]
    config = None
    if openai:
        triton = f"{'127.0.0.1' if host == '0.0.0.0' else host}:{grpc_port}"
        metrics = {"triton_metrics": triton.replace(f":{grpc_port}", f":{metrics_port}")} if on_demand else {}
        gateway_values |= _tls_of(flags, gateway_values)
        config = read_config(BESIDE_TRITON, gateway_values, triton=triton, host=host, port=openai_port, **metrics)
    for number in STOP_SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # `&` ignores SIGINT, nohup SIGHUP
            signal.signal(number, signal.default_int_handler)
    with contextlib.ExitStack() as stack:
        given = Path(what[0]) if len(what) == 1 and is_repository(what[0]) and not (settings or stream) else None
        if given is None and what:
            given = stack.enter_context(model_repository(what, settings, stream=stream, progress=show_download))
        excluded = {} if given is None else _find_defects(given, exit_on_error, may_fetch=EXPLICIT not in flags)
        repository = stack.enter_context(served_repository(given, excluded))
        door_folders = stack.enter_context(door_repository(repository, excluded)) if doors else None
        log = None if verbose else ServerLog()
        file = sys.stderr.fileno() if log is None else log.path
        server = TritonServer(
            repository,
            *([door_folders] if door_folders else []),
            ports=(http_port, grpc_port, metrics_port),
            host=host,
            arguments=[*flags, *_load_doors(flags, door_folders)],
            ready_timeout_s=load_timeout,
            log=file,
        )
        gateway = None if config is None else GatewayProcess(config, file, restricted_protocol_headers(flags))
        say(f"Starting tritonserver{f'; its log: {log.path}' if log else ''}")
        board = stack.enter_context(Board(may_be_live=log is not None))
        _show_failed(board, excluded)
        states = ModelStates(board, log, os.listdir(door_folders) if door_folders else ())
        was_ready = False
        with contextlib.suppress(KeyboardInterrupt), _running(server, gateway, states):
            if on_demand:
                ready = _describe_on_demand(server, config, excluded)
            else:
                ready = _describe_ready(server, config, states, exit_on_error, flags)
            board.close()
            say(ready)
            was_ready = True
            _wait(server, gateway, states)
    was_killed = was_ready and server.process is not None and server.process.returncode != 0
    say(
        "Stopped after Triton's time to exit: a connection was still open, or a model was not unloaded."
        if was_killed
        else "Stopped."
    )


@contextlib.contextmanager
def _running(server: TritonServer, gateway: GatewayProcess | None, states: ModelStates) -> Iterator[None]:
    """Start both; at the end the gateway finishes its requests in flight, and then Triton the others."""

    def check() -> None:
        states.update()
        if gateway is not None:
            gateway.check()

    try:
        if gateway is not None:
            gateway.start()
        server.start()
        if gateway is not None:
            gateway.wait_until_started()  # a matter of seconds, unlike the models
        server.wait_until_started(check)
        yield
    finally:
        grace_s = 0.0  # a second Ctrl+C ends both at once
        try:
            if gateway is not None:
                gateway.stop()
            grace_s = STOP_GRACE_S
        finally:
            server.stop(grace_s)


def _find_defects(repository: Path, exit_on_error: bool, *, may_fetch: bool) -> Mapping[str, str]:
    """The defects, by name, of folders that must be kept from tritonserver, for which `may_fetch` downloads.

    It is an error if no folder is left; with `exit_on_error`, if one has a defect.
    """
    folders = model_folders(repository)
    if not folders:
        raise click.UsageError(f"there is no model folder in {repository}: copy one in; a checkpoint has a config.json")
    faulty = defects(repository)
    others = [folder for folder in folders if folder.name not in faulty] if may_fetch else []
    failed = fetch_models(others, show_download)
    excluded = {**faulty, **{name: str(error) for name, error in failed.items()}}
    if len(excluded) == len(folders) or (excluded and exit_on_error):
        _show_failed(Board(), excluded)
        causes = [*map(SettingsError, faulty.values()), *failed.values()]
        cause = causes[0] if len(set(map(exit_code, causes))) == 1 else None
        raise ServerError("server_failed", _refusal(len(excluded) == len(folders))) from cause
    return excluded


def _check_no_gateway_options() -> None:
    """Refuse options of a gateway that does not run; without it, no API key is asked for."""
    source = click.get_current_context().get_parameter_source
    for name, option in BESIDE_TRITON.items():
        if source(name) is not ParameterSource.DEFAULT:
            raise click.UsageError(f"{option} needs the gateway: leave --no-openai out")


def _lock(flags: Sequence[str], file: Path) -> list[str]:
    """The flags that ask for a file's key, which none of them does yet."""
    for name in (HTTP_RESTRICTED, GRPC_RESTRICTED):
        if any(flag.startswith(name.rstrip("=")) for flag in flags):
            raise click.UsageError(f"--admin-key-file sets {name.rstrip('=')}: give one of them")
    key = file.read_text(errors="replace").strip()
    if not ADMIN_KEY.fullmatch(key):
        raise click.UsageError(
            f"--admin-key-file {file} must hold one key: 16 to 256 letters, digits and signs of +/_-"
        )
    return lock_flags(key)


def _tls_of(flags: Sequence[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """What the gateway needs to reach a Triton whose flags ask for TLS: it trusts that server's own certificate."""
    is_mutual = flag_value(flags, MUTUAL_TLS) in TRUE
    if not is_mutual and flag_value(flags, TLS) not in TRUE:
        return {}
    if is_mutual and values["triton_cert_file"] is None:
        raise click.UsageError(
            f"{MUTUAL_TLS} needs --triton-cert-file and --triton-key-file, for the gateway; or --no-openai"
        )
    return {"triton_ca_file": values["triton_ca_file"] or flag_value(flags, "--grpc-server-cert")}


def _check_own_flags(flags: Sequence[str]) -> None:
    """Refuse flags that the command sets itself."""
    for flag in flags:
        own = OWN_FLAGS.get(flag.partition("=")[0])
        if own:
            raise click.UsageError(f"{flag} is for the command itself: give {own} before --")


def _load_doors(flags: Sequence[str], doors: Path | None) -> list[str]:
    """The flags that load the stream doors of the folders which flags load."""
    loaded = [flag.removeprefix(LOAD) for flag in flags if flag.startswith(LOAD)]
    names = [f"{name}{DOOR_SUFFIX}" for name in loaded]
    return [f"{LOAD}{name}" for name in names if doors and (doors / name).exists()]


def _refusal(is_none_served: bool) -> str:
    subject = "no model is served" if is_none_served else "a model cannot be served, and --exit-on-error is set"
    return f"{subject}: correct what is said above"


def _describe_ready(
    server: TritonServer,
    config: GatewayConfig | None,
    states: ModelStates,
    exit_on_error: bool,
    flags: Sequence[str],
) -> str:
    """Show which folders are served, and why the others are not; returns what to say of those that are."""
    models = server.models()
    served = {folder.name for folder in model_folders(server.model_repository)}
    loaded = {model.name for model in models if model.state == "READY"}
    is_explicit = EXPLICIT in flags
    named = {flag.removeprefix(LOAD) for flag in flags if flag.startswith(LOAD)}
    reasons = {}
    for name in sorted(served - loaded):
        told = next((model.sentence for model in models if model.name == name and model.reason), "")
        reason = with_remedy(told) or _guess(server.model_repository / name)
        if reason or not is_explicit or {"*", name} & named:
            reasons[name] = reason or f"see Triton's log {states.log_place}"
    configs = [server.model_config(name) for name in sorted(served & loaded)]
    configs = [each for each in configs if (streamed_folder(each) or each["name"]) in loaded]
    states.settle([each["name"] for each in configs], reasons)
    if is_explicit and not (configs or reasons):
        return as_typed("Ready; no model is loaded: `hf-triton load NAME` loads one.")
    if not configs or (reasons and exit_on_error):
        raise ServerError("server_failed", _refusal(not configs))
    return ready_text(server, config, [loaded_model(server, each) for each in configs])


def _guess(folder: Path) -> str | None:
    """Why Triton gives no reason for not loading a folder, by its files."""
    reason = guess_reason(folder)
    if reason is None and ensemble_steps(folder):
        with contextlib.suppress(SettingsError):
            reason = next(misfits(folder), None)
    return reason


def _describe_on_demand(server: TritonServer, config: GatewayConfig | None, excluded: Mapping[str, str]) -> str:
    """What to say of folders that are loaded when they are asked for."""
    folders = {folder.name for folder in model_folders(server.model_repository)} - set(excluded)
    names = sorted(name for name in folders if name.removesuffix(DOOR_SUFFIX) not in folders - {name})
    requests = ready_text(server, config, [model_on_demand(server.model_repository / name) for name in names])
    return f"Loaded when asked for: {', '.join(names)}.\n{requests}"


def _show_failed(board: Board, reasons: Mapping[str, str]) -> None:
    for name, reason in sorted(reasons.items()):
        board.show(name, "failed", reason)


def _wait(server: TritonServer, gateway: GatewayProcess | None, states: ModelStates) -> None:
    """Wait until a signal comes."""
    try:
        while server.is_running():
            states.update()
            if gateway is not None:
                gateway.check()
            time.sleep(0.2)
    except KeyboardInterrupt:
        say("Stopping: waiting for requests in flight and open connections; Ctrl+C again stops at once.")
        raise
    except ServerError:
        say("Stopping, because the OpenAI gateway has ended.", err=True)
        raise
    states.update()
    raise ServerError("server_failed", f"tritonserver exited {server.describe_exit()}{server.describe_log()}")
