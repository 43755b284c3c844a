// SPDX-License-Identifier: Apache-2.0
// Shows the gateway's OpenAPI document with Swagger's files, which the package fastapi-offline brings.

SwaggerUIBundle({ url: "openapi.json", dom_id: "#swagger-ui" });
