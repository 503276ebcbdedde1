{{/* Version of the images, and the reported version. */}}
{{- define "tulle.version" -}}
{{- .Values.linkerdVersion | default .Chart.AppVersion }}
{{- end }}

{{- define "tulle.trust-domain" -}}
{{- .Values.identityTrustDomain | default .Values.clusterDomain }}
{{- end }}

{{/* Labels of an object. .component: its component, optional, .labels: additional labels, .root */}}
{{- define "tulle.labels" -}}
{{- if .component -}}
linkerd.io/control-plane-component: {{ .component }}
{{ end -}}
linkerd.io/control-plane-ns: {{ .root.Release.Namespace }}
{{- with mergeOverwrite (dict) .root.Values.commonLabels (.labels | default dict) }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "tulle.created-by" -}}
linkerd.io/created-by: tulle/helm {{ include "tulle.version" . }}
{{- end }}

{{/* Metadata of an object in .namespace, by default that of the release. .name, .component, .extraAnnotations, .root */}}
{{- define "tulle.metadata" -}}
name: {{ .name }}
namespace: {{ .namespace | default .root.Release.Namespace }}
labels:
  {{- include "tulle.labels" . | nindent 2 }}
annotations:
  {{- include "tulle.created-by" .root | nindent 2 }}
  {{- with .extraAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{/* Metadata of a cluster-scoped object. */}}
{{- define "tulle.cluster-metadata" -}}
name: {{ .name }}
labels:
  {{- include "tulle.labels" . | nindent 2 }}
annotations:
  {{- include "tulle.created-by" .root | nindent 2 }}
{{- end }}

{{/* Converts {cpu: {request, limit}, …} to the resources of a container. */}}
{{- define "tulle.resources" -}}
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

{{/*
Log filter of the destination container. Destination and policy are one process: if their levels differ, the filter
contains both.
*/}}
{{- define "tulle.destination-log-level" -}}
{{- $all := .Values.controllerLogLevel }}
{{- $policy := .Values.policyController.logLevel }}
{{- $levels := list "error" "warn" "info" "debug" "trace" }}
{{- if or (eq $all $policy) (not $policy) }}
{{- $all }}
{{- else }}
{{- if has $all (list "fatal" "panic") }}{{ $all = "error" }}{{ end }}
{{- if has $policy (list "fatal" "panic") }}{{ $policy = "error" }}{{ end }}
{{- if has $all $levels }}warn,tulle={{ $all }}{{ else }}{{ $all }}{{ end -}}
,{{- if has $policy $levels }}tulle_control::policy={{ $policy }}{{ else }}{{ $policy }}{{ end }}
{{- end }}
{{- end }}

{{/* Checks of several values together, which a schema cannot express. */}}
{{- define "tulle.check" -}}
{{- if not .Values.identity.externalCA }}
{{- if not .Values.identityTrustAnchorsPEM }}
{{- fail "identityTrustAnchorsPEM is missing: set the trust anchors of the mesh with --set-file identityTrustAnchorsPEM=ca.crt, or set identity.externalCA=true and create the ConfigMap linkerd-identity-trust-roots" }}
{{- end }}
{{- end }}
{{- if eq .Values.identity.issuer.scheme "linkerd.io/tls" }}
{{- if not .Values.identity.issuer.tls.crtPEM }}
{{- fail "identity.issuer.tls.crtPEM is missing: set the issuer's certificate with --set-file identity.issuer.tls.crtPEM=issuer.crt, or set identity.issuer.scheme=kubernetes.io/tls and create the Secret linkerd-identity-issuer" }}
{{- end }}
{{- if not .Values.identity.issuer.tls.keyPEM }}
{{- fail "identity.issuer.tls.keyPEM is missing: set the issuer's key with --set-file identity.issuer.tls.keyPEM=issuer.key, or set identity.issuer.scheme=kubernetes.io/tls and create the Secret linkerd-identity-issuer" }}
{{- end }}
{{- end }}
{{- if and (ne (int .Values.proxyInit.closeWaitTimeoutSecs) 0) (not .Values.proxyInit.runAsRoot) }}
{{- fail "proxyInit.closeWaitTimeoutSecs needs proxyInit.runAsRoot=true: only root can change it" }}
{{- end }}
{{- if and .Values.cniEnabled (eq .Values.proxy.inboundMode "tproxy") }}
{{- fail "proxy.inboundMode=tproxy needs cniEnabled=false: the CNI plugin supports redirect only" }}
{{- end }}
{{- with .Values.proxy.tracing }}
{{- if .enabled }}
{{- if not .collector.endpoint }}
{{- fail "proxy.tracing.collector.endpoint is missing: tracing is enabled, set the address of the collector" }}
{{- end }}
{{- if not (and .collector.meshIdentity.serviceAccountName .collector.meshIdentity.namespace) }}
{{- fail "proxy.tracing.collector.meshIdentity is missing: set serviceAccountName and namespace of the collector" }}
{{- end }}
{{- end }}
{{- end }}
{{- range $name := list "proxyInjector" "profileValidator" "policyValidator" }}
{{- $webhook := index $.Values $name }}
{{- if and $webhook.injectCaFrom $webhook.injectCaFromSecret }}
{{- fail (printf "%s.injectCaFrom and %s.injectCaFromSecret are both set: set only one of them" $name $name) }}
{{- end }}
{{- if or $webhook.injectCaFrom $webhook.injectCaFromSecret }}
{{- if $webhook.caBundle }}
{{- fail (printf "%s.caBundle and %s.injectCaFrom or injectCaFromSecret are both set: set only one of them" $name $name) }}
{{- end }}
{{- if not $webhook.externalSecret }}
{{- fail (printf "%s.injectCaFrom and injectCaFromSecret need %s.externalSecret=true: without it the webhook generates its own certificate" $name $name) }}
{{- end }}
{{- else if and $webhook.externalSecret (not $webhook.caBundle) }}
{{- fail (printf "%s.externalSecret needs the CA that signed it: set %s.caBundle, injectCaFrom or injectCaFromSecret" $name $name) }}
{{- end }}
{{- if ne (empty $webhook.crtPEM) (empty $webhook.keyPEM) }}
{{- fail (printf "%s.crtPEM and %s.keyPEM must be set together" $name $name) }}
{{- end }}
{{- end }}
{{- end }}
