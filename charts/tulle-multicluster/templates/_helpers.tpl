{{/* Version of the images, and the reported version. */}}
{{- define "tulle-multicluster.version" -}}
{{- .Values.linkerdVersion | default .Chart.AppVersion }}
{{- end }}

{{/* Labels of an object. .labels: additional labels, .root */}}
{{- define "tulle-multicluster.labels" -}}
linkerd.io/extension: multicluster
{{- with mergeOverwrite (dict) .root.Values.commonLabels (.labels | default dict) }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "tulle-multicluster.created-by" -}}
linkerd.io/created-by: tulle/helm {{ include "tulle-multicluster.version" . }}
{{- end }}

{{/* Metadata of an object. .name, .labels, .extraAnnotations, .root */}}
{{- define "tulle-multicluster.metadata" -}}
name: {{ .name }}
namespace: {{ .namespace | default .root.Release.Namespace }}
labels:
  {{- include "tulle-multicluster.labels" . | nindent 2 }}
annotations:
  {{- include "tulle-multicluster.created-by" .root | nindent 2 }}
  {{- with .extraAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{/* Metadata of a cluster-scoped object. */}}
{{- define "tulle-multicluster.cluster-metadata" -}}
name: {{ .name }}
labels:
  {{- include "tulle-multicluster.labels" . | nindent 2 }}
annotations:
  {{- include "tulle-multicluster.created-by" .root | nindent 2 }}
{{- end }}

{{/* Converts {cpu: {request, limit}, …} to the resources of a container. */}}
{{- define "tulle-multicluster.resources" -}}
{{- $requests := dict }}
{{- $limits := dict }}
{{- range $name, $of := . }}
{{- if $of.request }}{{ $_ := set $requests $name $of.request }}{{ end }}
{{- if $of.limit }}{{ $_ := set $limits $name $of.limit }}{{ end }}
{{- end }}
{{- if $limits }}
limits:
  {{- toYaml $limits | nindent 2 }}
{{- end }}
{{- if $requests }}
requests:
  {{- toYaml $requests | nindent 2 }}
{{- end }}
{{- end }}

{{/* The values that the control plane has recorded in linkerd-config; none in a rendering without a cluster. */}}
{{- define "tulle-multicluster.control-plane-values" -}}
{{- $config := lookup "v1" "ConfigMap" .Values.linkerdNamespace "linkerd-config" | default dict }}
{{- with $config.data }}{{ .values }}{{ end }}
{{- end }}

{{/* The trust domain of the control plane; empty if it is not known. */}}
{{- define "tulle-multicluster.control-plane-trust-domain" -}}
{{- $values := include "tulle-multicluster.control-plane-values" . | fromYaml }}
{{- $values.identityTrustDomain | default $values.clusterDomain | default "" }}
{{- end }}

{{- define "tulle-multicluster.trust-domain" -}}
{{- .Values.identityTrustDomain | default (include "tulle-multicluster.control-plane-trust-domain" .) | default "cluster.local" }}
{{- end }}

{{/*
Pod Security level of the namespace. Pods are injected with an init container that changes the network, which only the
level `privileged` permits; with a CNI plugin they have none.
*/}}
{{- define "tulle-multicluster.pod-security-level" -}}
{{- $cniEnabled := .Values.cniEnabled }}
{{- if kindIs "invalid" $cniEnabled }}
{{- $cniEnabled = (include "tulle-multicluster.control-plane-values" . | fromYaml).cniEnabled }}
{{- end }}
{{- ternary "restricted" "privileged" (eq (toString $cniEnabled) "true") }}
{{- end }}

{{/* The accounts of other clusters, as a JSON list. */}}
{{- define "tulle-multicluster.remote-accounts" -}}
{{- $names := .Values.remoteMirrorServiceAccountName }}
{{- if kindIs "string" $names }}{{ $names = splitList "," $names }}{{ end }}
{{- $accounts := list }}
{{- range $names }}
{{- with trim . }}{{ $accounts = append $accounts . }}{{ end }}
{{- end }}
{{- if not .Values.remoteMirrorServiceAccount }}{{ $accounts = list }}
{{- else if not $accounts }}
{{- fail "remoteMirrorServiceAccountName is empty: set the name of an account, or remoteMirrorServiceAccount=false" }}
{{- end }}
{{- toJson (uniq $accounts) }}
{{- end }}

{{/* The controllers with their defaults, after the checks of all values, as a JSON list; .name is the name of the Link. */}}
{{- define "tulle-multicluster.controllers" -}}
{{- include "tulle-multicluster.check" . }}
{{- $controllers := list }}
{{- $links := list }}
{{- range $index, $own := .Values.controllers }}
{{- $name := dig "link" "ref" "name" "" $own }}
{{- $place := printf "controllers[%d]" $index }}
{{- if not $name }}
{{- fail (printf "%s.link.ref.name is missing: set the name of the Link that the controller mirrors from" $place) }}
{{- end }}
{{- if not (and (le (len $name) 57) (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" (printf "probe-%s" $name))) }}
{{- fail (printf "%s.link.ref.name=%q cannot be part of a Service name: use at most 57 lower-case letters, digits and '-', with no '-' at the end" $place $name) }}
{{- end }}
{{- if has $name $links }}
{{- fail (printf "%s.link.ref.name=%q is also the name of another controller: a Link has one controller; set its replicas for several pods" $place $name) }}
{{- end }}
{{- $links = append $links $name }}
{{- $controller := mergeOverwrite (deepCopy $.Values.controllerDefaults) (deepCopy $own) }}
{{- include "tulle-multicluster.check-unsupported" (dict "place" $place "of" $controller) }}
{{- $controllers = append $controllers (set $controller "name" $name) }}
{{- end }}
{{- toJson $controllers }}
{{- end }}

{{/* Values of a controller that its program does not support. .place: path of the values, .of */}}
{{- define "tulle-multicluster.check-unsupported" -}}
{{- if .of.enablePprof }}
{{- fail (printf "%s.enablePprof=true is not supported: remove it; the program serves no pprof profiles" .place) }}
{{- end }}
{{- end }}

{{/* Checks that a schema cannot express. A value without effect is refused. */}}
{{- define "tulle-multicluster.check" -}}
{{- include "tulle-multicluster.check-unsupported" (dict "place" "controllerDefaults" "of" .Values.controllerDefaults) }}
{{- include "tulle-multicluster.check-unsupported" (dict "place" "localServiceMirror" "of" .Values.localServiceMirror) }}
{{- if .Values.enablePSP }}
{{- fail "enablePSP=true has no effect: remove it; Kubernetes has removed PodSecurityPolicy" }}
{{- end }}
{{- if ne (int .Values.proxyOutboundPort) 4140 }}
{{- fail "proxyOutboundPort has no effect: remove it; the control plane sets the ports of proxies (proxy.ports.outbound)" }}
{{- end }}
{{- if or .Values.createNamespaceMetadataJob .Values.namespaceMetadata }}
{{- fail "createNamespaceMetadataJob and namespaceMetadata are not supported: remove them, and label the namespace with kubectl as the README describes" }}
{{- end }}
{{- with .Values.gateway }}
{{- if .enabled }}
{{- if eq .serviceType "ClusterIP" }}
{{- range $name, $value := dict "nodePort" .nodePort "probe.nodePort" .probe.nodePort "serviceExternalTrafficPolicy" .serviceExternalTrafficPolicy }}
{{- if $value }}
{{- fail (printf "gateway.%s has no effect with gateway.serviceType=ClusterIP: remove it" $name) }}
{{- end }}
{{- end }}
{{- end }}
{{- if ne .serviceType "LoadBalancer" }}
{{- range $name, $value := dict "healthCheckNodePort" .healthCheckNodePort "loadBalancerClass" .loadBalancerClass "loadBalancerIP" .loadBalancerIP "loadBalancerSourceRanges" .loadBalancerSourceRanges }}
{{- if $value }}
{{- fail (printf "gateway.%s needs gateway.serviceType=LoadBalancer: remove it, or change the type" $name) }}
{{- end }}
{{- end }}
{{- else if and .healthCheckNodePort (ne .serviceExternalTrafficPolicy "Local") }}
{{- fail "gateway.healthCheckNodePort needs gateway.serviceExternalTrafficPolicy=Local: load balancers check nodes only with it" }}
{{- end }}
{{- if eq (int .port) (int .probe.port) }}
{{- fail (printf "gateway.port and gateway.probe.port are both %d: set different ports" (int .port)) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
