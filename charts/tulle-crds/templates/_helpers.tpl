{{/* Metadata of all definitions of this chart. */}}
{{- define "tulle-crds.labels" -}}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version | replace "+" "_" }}
linkerd.io/control-plane-ns: {{ .Release.Namespace }}
{{- end }}

{{- define "tulle-crds.annotations" -}}
linkerd.io/created-by: tulle/helm {{ .Chart.AppVersion }}
{{- end }}

{{/* Whether a group of routes is installed. .value: its own value, .all: the value for all groups */}}
{{- define "tulle-crds.routes" -}}
{{- if kindIs "invalid" .value }}{{ .all }}{{ else }}{{ .value }}{{ end }}
{{- end }}

{{/* metav1.LabelSelector */}}
{{- define "tulle-crds.selector" -}}
type: object
properties:
  matchLabels:
    type: object
    x-kubernetes-preserve-unknown-fields: true
  matchExpressions:
    type: array
    items:
      type: object
      required: [key, operator]
      properties:
        key:
          type: string
        operator:
          type: string
          enum: [In, NotIn, Exists, DoesNotExist]
        values:
          type: array
          items:
            type: string
{{- end }}

{{/* A list of networks with exceptions. */}}
{{- define "tulle-crds.networks" -}}
type: array
items:
  type: object
  required: [cidr]
  properties:
    cidr:
      description: A network in CIDR form, or one address.
      type: string
    except:
      description: Networks inside of it that do not count.
      type: array
      items:
        type: string
{{- end }}

{{/* A reference to an object. .namespace: whether it can be in another namespace */}}
{{- define "tulle-crds.reference" -}}
type: object
required: [kind, name]
properties:
  group:
    description: The API group; empty means core.
    type: string
    maxLength: 253
  kind:
    type: string
    minLength: 1
    maxLength: 63
  name:
    type: string
    minLength: 1
    maxLength: 253
  {{- if .namespace }}
  namespace:
    description: By default the namespace of this object.
    type: string
    minLength: 1
    maxLength: 63
  {{- end }}
{{- end }}

{{/* []metav1.Condition */}}
{{- define "tulle-crds.conditions" -}}
type: array
maxItems: 8
x-kubernetes-list-type: map
x-kubernetes-list-map-keys: [type]
items:
  type: object
  required: [type, status, lastTransitionTime, reason, message]
  properties:
    type:
      type: string
      maxLength: 316
    status:
      type: string
      enum: ["True", "False", Unknown]
    observedGeneration:
      type: integer
      format: int64
      minimum: 0
    lastTransitionTime:
      type: string
      format: date-time
    reason:
      type: string
      minLength: 1
      maxLength: 1024
    message:
      type: string
      maxLength: 32768
{{- end }}

{{/* A deprecated version. .kind, .group, .version, .use: the version to use instead */}}
{{- define "tulle-crds.deprecated" -}}
deprecated: true
deprecationWarning: {{ .group }}/{{ .version }} {{ .kind }} is deprecated; use {{ .group }}/{{ .use }} {{ .kind }}
{{- end }}
