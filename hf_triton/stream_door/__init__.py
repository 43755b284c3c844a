# SPDX-License-Identifier: Apache-2.0
"""The stream door: requests of a folder without weights go to another folder's engine, in another process.

`address` says where an engine listens, `connection` moves messages, `messages` says what is in them, `door_server` is
the engine's side, `client` and `door_model` the door's. None of them knows Triton, text or tokens: tensors go in and
come out.
"""
