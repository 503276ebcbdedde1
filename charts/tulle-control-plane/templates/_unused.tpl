{{/*
Values that are accepted and have no effect, each with its default and with the reason; one without a default is absent
from values.yaml.
*/}}
{{- define "tulle.unused" -}}
{{- $noProbe := dict "timeoutSeconds" 1 }}
{{- $noResources := dict }}
{{- $none := dict "request" "" "limit" "" }}
{{- $ofPolicy := dict "cpu" $none "memory" $none "ephemeral-storage" $none }}
{{- $untraced := dict "enabled" false "collector" (dict "endpoint" "") }}
{{- $sidecars := "the control plane has no sidecars" }}
{{- $one := "the components of destination are one container: destinationResources are its own" }}
{{- $probed := "the components of destination are one container: its probes are destinationController's" }}
{{- $heartbeat := "nothing is reported to anybody" }}
{{- $written := "only Linkerd's own tools write it" }}
{{- $injector := "the injector decides it" }}
{{- $told := "the proxy is told, and tulle's does not have it" }}
{{- toYaml (list
  (dict "value" "enablePprof" "default" false "because" "there is no profile to serve")
  (dict "value" "enablePSP" "default" false "because" "PodSecurityPolicy is gone from Kubernetes")
  (dict "value" "controller.tracing" "default" $untraced "because" "the control plane sends no traces")
  (dict "value" "disableHeartBeat" "default" true "because" $heartbeat)
  (dict "value" "heartbeatSchedule" "default" "" "because" $heartbeat)
  (dict "value" "heartbeat" "default" dict "because" $heartbeat)
  (dict "value" "heartbeatResources" "default" $noResources "because" $heartbeat)
  (dict "value" "prometheusUrl" "default" "" "because" $heartbeat)
  (dict "value" "policyController.livenessProbe" "default" $noProbe "because" $probed)
  (dict "value" "policyController.readinessProbe" "default" $noProbe "because" $probed)
  (dict "value" "policyController.resources" "default" $ofPolicy "because" $one)
  (dict "value" "spValidator.livenessProbe" "default" $noProbe "because" $probed)
  (dict "value" "spValidator.readinessProbe" "default" $noProbe "because" $probed)
  (dict "value" "spValidatorResources" "default" $noResources "because" $one)
  (dict "value" "controllerResources" "default" $noResources "because" "each component has its own resources")
  (dict "value" "destinationProxyResources" "default" $noResources "because" $sidecars)
  (dict "value" "identityProxyResources" "default" $noResources "because" $sidecars)
  (dict "value" "proxyInjectorProxyResources" "default" $noResources "because" $sidecars)
  (dict "value" "proxyInit.kubeAPIServerPorts" "default" "443,6443" "because" $sidecars)
  (dict "value" "proxyInit.capabilities" "because" $injector)
  (dict "value" "proxyInit.resources" "because" "the init container has proxy.resources")
  (dict "value" "proxyInit.saMountPath" "because" $injector)
  (dict "value" "proxy.loadTrustBundleFromConfigMap" "because" $injector)
  (dict "value" "proxy.podInboundPorts" "because" $injector)
  (dict "value" "proxy.saMountPath" "because" $injector)
  (dict "value" "proxy.tracing.protocol" "because" "it is opentelemetry")
  (dict "value" "proxy.requireTLSOnInboundPorts" "default" "" "because" "no proxy reads it: a Server says who may connect")
  (dict "value" "proxy.inbound.server.http2.adaptiveFlowControl" "because" $told)
  (dict "value" "proxy.inbound.server.http2.maxPendingAcceptResetStreams" "because" $told)
  (dict "value" "proxy.outbound.server.http2.adaptiveFlowControl" "because" $told)
  (dict "value" "proxy.outbound.server.http2.maxPendingAcceptResetStreams" "because" $told)
  (dict "value" "networkValidator.enableSecurityContext" "because" "the network validator always has one")
  (dict "value" "configs" "because" $written)
  (dict "value" "image" "because" "see controllerImageVersion and proxy.image.version")
  (dict "value" "partials" "because" $written)
  (dict "value" "proxyContainerName" "because" $written)
  (dict "value" "stage" "because" $written)
) }}
{{- end }}

{{/* Those that were set to something else, a line each. */}}
{{- define "tulle.unused-lines" -}}
{{- range fromYamlArray (include "tulle.unused" .) }}
{{- $is := $.Values }}
{{- range splitList "." .value }}
{{- $is = index (kindIs "map" $is | ternary $is dict) . }}
{{- end }}
{{- if ne (toJson $is) (toJson .default) }}
{{ .value }}: {{ .because }}
{{- end }}
{{- end }}
{{- end }}
