# SPDX-License-Identifier: Apache-2.0
"""docs/security.md: its commands run, its defaults are the declared ones, and a test holds each of its promises."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from hf_triton.server import ADMIN_APIS, ADMIN_HEADER
from hf_triton.settings import ModelSettings
from hf_triton_gateway.gateway_config import GatewayConfig
from tests.support.paths import ROOT
from tests.support.serving import running

TEXT = (ROOT / "docs" / "security.md").read_text()
WORDS = " ".join(TEXT.split())
HELD_BY = {
    "Triton does not authenticate clients": "openai/test_tls.py::test_the_key_opens_it_over_http",
    "but for its health and the page's files": "openai/test_security.py::test_the_page_needs_no_key",
    "`Authorization: Bearer KEY` or `x-api-key: KEY`": "openai/test_security.py::test_keys_of_a_file_are_required",
    "loading and unloading, the index, shared memory": "openai/test_tls.py::test_what_changes_a_server_is_closed",
    "of two different keys in one request neither": "openai/test_security.py::test_two_keys_are_none",
    "is its key's alone": "openai/test_stored_responses.py::test_a_response_is_its_keys_own",
    "Keys are read again when their file changes": "openai/test_security.py::test_keys_are_replaced_with_their_file",
    "their Triton is locked": "deploy/test_files.py::test_each_description_of_a_fleet_locks",
    "publish 9000 alone": "deploy/test_files.py::test_compose_takes_its_files",
    "Secrets are files": "deploy/test_files.py::test_secrets_are_files",
    "import nothing from the folder in which": "cli/test_serve.py::test_printed_commands_work_and_ctrl_c_stops_all",
    "keeps a place of a server": "deploy/test_files.py::test_half_sent_requests_without_a_key_take_no_servers_place",
    "the rest of one that is refused": "openai/test_http.py::test_the_rest_of_a_refused_request_is_not_waited_for",
    "TLS 1.2 and 1.3": "openai/test_tls.py::test_old_versions_of_tls_are_refused",
    "A renewed certificate": "openai/test_tls.py::test_a_certificate_is_read_again",
    "has the lines for TLS": "deploy/test_files.py::test_haproxy_speaks_tls_on_both_sides",
    "options of `hf-triton openai` and of every command": "openai/test_tls.py::test_commands_speak_tls",
    "trusts that server's own certificate": "openai/test_tls.py::test_the_gateway_serves_https",
    "takes an `https://` address": "openai/test_tls.py::test_run_batch_speaks_https",
    "not downloaded and not run": "unit/test_hub_download.py::test_nothing_that_can_run_is_downloaded",
    "unless the folder sets `trust_remote_code`": "models/test_checkpoint.py::test_code_runs_only_if_trusted",
    "unless the folder sets `allow_pickle`": "models/test_checkpoint.py::test_pickle_is_refused_unless_allowed",
    "then read without running code": "models/test_checkpoint.py::test_allowed_pickle_runs_no_code",
    "names a file outside of its folder": "unit/test_snapshot.py::test_an_index_names_safetensors_of_its_folder",
    "safetensors alone, checked": "engine/test_adapter_refusals.py::test_tensors_are_refused",
    "one beside a model": "unit/test_snapshot.py::test_an_adapter_beside_a_model_is_not_applied_unseen",
    "the header is read with bounds": "unit/test_hub_gguf.py::test_a_hostile_header_is_one_sentence",
    "without files, network or environment": "unit/test_chat_template.py::test_a_hostile_template_reaches_neither",
    "after 3 seconds": "unit/test_response_templates.py::test_a_pattern_that_takes_too_long_makes_all_content",
    "compiled with bounds of time and memory": "unit/test_grammar_errors.py::test_hostile_grammar_takes_little_time",
    "before anything is decoded": "unit/test_images.py::test_a_bomb_is_not_decoded",
    "pixels and seconds are bounded": "unit/test_audio.py::test_hours_of_silence_are_refused_before_they_are_read",
    "path without its query": "openai/test_security.py::test_log_has_no_prompt_no_key_and_no_query",
    "no access token in an error": "server/test_hub_errors.py::test_access_token_is_in_no_log_and_no_answer",
    "all bodies in a worker": "cli/test_bodies.py::test_half_sent_bodies_hold_no_more_than_the_limit",
    "values of a JSON body": "unit/test_bodies.py::test_body_of_too_many_values_is_refused",
    "requests in flight in a worker": "openai/test_security.py::test_requests_beyond_the_limit_are_told_to_come_again",
    "time for its answer": "openai/test_security.py::test_request_that_takes_too_long_ends_with_504",
    "time for a request to arrive": "openai/test_disconnect.py::test_request_that_does_not_arrive",
    "stored responses": "unit/test_response_store.py::test_bytes_are_bounded_conversations_included",
    "prompts of a request": "unit/test_requests.py::test_the_number_of_prompts_is_bounded",
    "prompts that wait for a model": "unit/test_text_generation.py::test_the_gate_bounds_waiting_prompts",
    "a wheel in a version that was tested": "deploy/test_pins.py::test_what_the_image_installs_is_pinned_as_tested",
    "runs as user 1000": "container/test_image.py::test_inside",
}
"""A promise's words, and the beginning of the tests that hold it."""


@pytest.mark.parametrize(("words", "test"), HELD_BY.items(), ids=HELD_BY)
def test_a_promise_is_held_by_a_test(words: str, test: str) -> None:
    file, _, name = test.partition("::")
    assert words in WORDS
    assert f"def {name}" in (ROOT / "tests" / file).read_text()


def test_defaults_are_the_declared_ones() -> None:
    gateway = GatewayConfig()
    assert (gateway.host, gateway.port, gateway.api_key_file, gateway.allowed_origins) == ("127.0.0.1", 9000, None, ())
    folder = ModelSettings.model_fields
    assert (folder["trust_remote_code"].default, folder["allow_pickle"].default) == (False, False)
    assert all(f"`{api}`" in TEXT for api in ADMIN_APIS)
    assert f"`{ADMIN_HEADER}: KEY`" in TEXT
    assert f"`triton-grpc-protocol-{ADMIN_HEADER}: KEY`" in TEXT


@pytest.mark.full
def test_the_commands_for_tls_work(tmp_path: Path) -> None:
    make, ask = re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)
    *files, serve = make.replace("\\\n", "").splitlines()
    subprocess.run(["bash", "-ec", "\n".join(files)], cwd=tmp_path, check=True, capture_output=True)
    assert all((tmp_path / name).stat().st_mode & 0o077 == 0 for name in ("keys", "admin-key"))
    with running(*shlex.split(serve)[2:], output=tmp_path / "output", folder=tmp_path) as serving:
        serving.wait_for("Ctrl+C stops the server")
        ask = ask.replace("9000", str(serving.openai_port))
        asked = subprocess.run(["bash", "-ec", ask], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert '"id":"demo"' in asked.stdout.replace(" ", "")
        refused = subprocess.run(["bash", "-ec", ask.partition(" -H")[0]], cwd=tmp_path, capture_output=True, text=True)
        assert "invalid_api_key" in refused.stdout
