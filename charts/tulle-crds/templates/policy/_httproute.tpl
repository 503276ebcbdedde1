{{/* Schemas of policy.linkerd.io HTTPRoutes. */}}

{{- define "tulle-crds.hostname" -}}
type: string
minLength: 1
maxLength: 253
pattern: '^{{ if eq . "wild" }}(\*\.)?{{ end }}[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$'
{{- end }}

{{- define "tulle-crds.parent-ref" -}}
type: object
required: [name]
properties:
  group:
    type: string
    default: policy.linkerd.io
    maxLength: 253
  kind:
    type: string
    default: Gateway
    minLength: 1
    maxLength: 63
  name:
    type: string
    minLength: 1
    maxLength: 253
  namespace:
    type: string
    minLength: 1
    maxLength: 63
  sectionName:
    type: string
    minLength: 1
    maxLength: 253
  port:
    type: integer
    format: int32
    minimum: 1
    maximum: 65535
{{- end }}

{{- define "tulle-crds.route-match" -}}
description: Requests that meet all these conditions.
type: object
properties:
  path:
    type: object
    default: {type: PathPrefix, value: /}
    properties:
      type:
        type: string
        default: PathPrefix
        enum: [Exact, PathPrefix, RegularExpression]
      value:
        type: string
        default: /
        maxLength: 1024
  headers:
    {{- include "tulle-crds.named-matches" . | nindent 4 }}
  queryParams:
    {{- include "tulle-crds.named-matches" . | nindent 4 }}
  method:
    type: string
    enum: [GET, HEAD, POST, PUT, DELETE, CONNECT, OPTIONS, TRACE, PATCH]
{{- end }}

{{- define "tulle-crds.named-matches" -}}
type: array
maxItems: 16
x-kubernetes-list-type: map
x-kubernetes-list-map-keys: [name]
items:
  type: object
  required: [name, value]
  properties:
    type:
      type: string
      default: Exact
      enum: [Exact, RegularExpression]
    name:
      type: string
      minLength: 1
      maxLength: 256
    value:
      type: string
      minLength: 1
      maxLength: 4096
{{- end }}

{{- define "tulle-crds.route-filters" -}}
type: array
maxItems: 16
items:
  type: object
  required: [type]
  properties:
    type:
      type: string
      enum: [RequestHeaderModifier, RequestRedirect]
    requestHeaderModifier:
      type: object
      properties:
        set:
          {{- include "tulle-crds.headers" . | nindent 10 }}
        add:
          {{- include "tulle-crds.headers" . | nindent 10 }}
        remove:
          type: array
          maxItems: 16
          items:
            type: string
    requestRedirect:
      type: object
      properties:
        scheme:
          type: string
          enum: [http, https]
        hostname:
          {{- include "tulle-crds.hostname" "exact" | nindent 10 }}
        path:
          type: object
          required: [type]
          properties:
            type:
              type: string
              enum: [ReplaceFullPath, ReplacePrefixMatch]
            replaceFullPath:
              type: string
              maxLength: 1024
            replacePrefixMatch:
              type: string
              maxLength: 1024
        port:
          type: integer
          format: int32
          minimum: 1
          maximum: 65535
        statusCode:
          type: integer
          default: 302
          enum: [301, 302]
{{- end }}

{{- define "tulle-crds.headers" -}}
type: array
maxItems: 16
x-kubernetes-list-type: map
x-kubernetes-list-map-keys: [name]
items:
  type: object
  required: [name, value]
  properties:
    name:
      type: string
      minLength: 1
      maxLength: 256
      pattern: "^[A-Za-z0-9!#$%&'*+\\-.^_\\x60|~]+$"
    value:
      type: string
      minLength: 1
      maxLength: 4096
{{- end }}

{{- define "tulle-crds.backend-ref" -}}
type: object
required: [name]
properties:
  group:
    type: string
    default: ""
    maxLength: 253
  kind:
    type: string
    default: Service
    minLength: 1
    maxLength: 63
  name:
    type: string
    minLength: 1
    maxLength: 253
  namespace:
    type: string
    minLength: 1
    maxLength: 63
  port:
    type: integer
    format: int32
    minimum: 1
    maximum: 65535
  weight:
    type: integer
    format: int32
    default: 1
    minimum: 0
    maximum: 1000000
  filters:
    {{- include "tulle-crds.route-filters" . | nindent 4 }}
{{- end }}
