{{/* Parts of the definition of Link. */}}

{{/* metav1.LabelSelector. An absent or empty one selects nothing. . is its description. */}}
{{- define "tulle-multicluster.selector" -}}
description: {{ . | quote }}
type: object
properties:
  matchLabels:
    type: object
    x-kubernetes-preserve-unknown-fields: true
  matchExpressions:
    type: array
    # The cost of the rules of an object is limited, so the number of expressions is, too.
    maxItems: 100
    items:
      type: object
      required: [key, operator]
      x-kubernetes-validations:
        - rule: "self.operator in ['In', 'NotIn'] ? has(self.values) && size(self.values) > 0 : !has(self.values) || size(self.values) == 0"
          message: the operators In and NotIn need values, and Exists and DoesNotExist have none
      properties:
        key:
          type: string
          minLength: 1
        operator:
          type: string
          enum: [In, NotIn, Exists, DoesNotExist]
        values:
          type: array
          items:
            type: string
{{- end }}

{{/* CEL: the condition that the field . of self is a port. */}}
{{- define "tulle-multicluster.is-port" -}}
(has(self.{{ . }}) && self.{{ . }}.matches('^[0-9]{1,5}$') && int(self.{{ . }}) > 0 && int(self.{{ . }}) <= 65535)
{{- end }}

{{/* CEL: the condition that the field . of self is absent, empty, or a duration in Go's syntax above 0. */}}
{{- define "tulle-multicluster.is-duration" -}}
(!has(self.{{ . }}) || self.{{ . }} == '' || (self.{{ . }}.matches('^[+]?(([0-9]+[.]?[0-9]*|[.][0-9]+)(ns|us|µs|ms|s|m|h))+$') && self.{{ . }}.matches('[1-9]')))
{{- end }}

{{/* Names of annotations or labels. . is their description. */}}
{{- define "tulle-multicluster.exclusions" -}}
description: {{ . | quote }}
type: array
items:
  type: string
{{- end }}

{{/* A reference to a Service. . is its description. */}}
{{- define "tulle-multicluster.service-reference" -}}
description: {{ . | quote }}
type: object
required: [name, namespace]
properties:
  group:
    type: string
    default: core
  kind:
    type: string
    default: Service
  name:
    type: string
  namespace:
    type: string
{{- end }}

{{/* Statuses of Services. . is their description. */}}
{{- define "tulle-multicluster.service-statuses" -}}
description: {{ . | quote }}
type: array
items:
  type: object
  required: [controllerName, remoteRef]
  properties:
    controllerName:
      description: The controller that wrote this entry.
      type: string
    remoteRef:
      {{- include "tulle-multicluster.service-reference" "The Service of the other cluster." | nindent 6 }}
    conditions:
      type: array
      items:
        type: object
        required: [type, status, reason, message, lastTransitionTime]
        properties:
          type:
            type: string
          status:
            type: string
            enum: ["True", "False", Unknown]
          reason:
            type: string
          message:
            type: string
          lastTransitionTime:
            type: string
            format: date-time
          localRef:
            {{- include "tulle-multicluster.service-reference" "The Service of this cluster." | nindent 12 }}
{{- end }}
