# SPDX-License-Identifier: Apache-2.0
"""The APIs of coding agents, Responses and Messages, each request as a chat."""
