{{/*
Values that are accepted and have no effect, with their default and the reason. Those without a default are not in
values.yaml.
*/}}
{{- define "tulle.unused" -}}
{{- $noProbe := dict "timeoutSeconds" 1 }}
{{- $noResources := dict }}
{{- $none := dict "request" "" "limit" "" }}
{{- $ofPolicy := dict "cpu" $none "memory" $none "ephemeral-storage" $none }}
{{- $untraced := dict "enabled" false "collector" (dict "endpoint" "") }}
{{- $sidecars := "the control plane has no sidecars" }}
{{- $one := "the components of destination are one container with destinationResources" }}
{{- $probed := "the components of destination are one container with the probes of destinationController" }}
{{- $monitored := dict "enabled" true "honorTimestamps" false }}
{{- $heartbeat := "the control plane reports nothing to third parties" }}
{{- $linkerdTools := "only Linkerd's tools use it" }}
{{- $injector := "the injector determines it" }}
{{- $unsupported := "tulle's proxy does not support it" }}
{{- toYaml (list
  (dict "value" "enablePprof" "default" false "because" "the control plane serves no pprof profiles")
  (dict "value" "enablePSP" "default" false "because" "Kubernetes has removed PodSecurityPolicy")
  (dict "value" "controller.tracing" "default" $untraced "because" "the control plane sends no traces")
  (dict "value" "disableHeartBeat" "default" true "because" $heartbeat)
  (dict "value" "heartbeatSchedule" "default" "" "because" $heartbeat)
  (dict "value" "heartbeat" "default" dict "because" $heartbeat)
  (dict "value" "heartbeatResources" "default" $noResources "because" $heartbeat)
  (dict "value" "prometheusUrl" "default" "" "because" $heartbeat)
  (dict "value" "podMonitor.serviceMirror" "default" $monitored "because" "see podMonitor.enabled of tulle-multicluster")
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
  (dict "value" "proxy.tracing.protocol" "because" "the protocol is always opentelemetry")
  (dict "value" "proxy.requireTLSOnInboundPorts" "default" "" "because" "proxies do not read it; use a Server with an AuthorizationPolicy")
  (dict "value" "proxy.inbound.server.http2.adaptiveFlowControl" "because" $unsupported)
  (dict "value" "proxy.outbound.server.http2.adaptiveFlowControl" "because" $unsupported)
  (dict "value" "networkValidator.enableSecurityContext" "because" "the network validator always has one")
  (dict "value" "configs" "because" $linkerdTools)
  (dict "value" "image" "because" "see controllerImageVersion and proxy.image.version")
  (dict "value" "partials" "because" $linkerdTools)
  (dict "value" "proxyContainerName" "because" $linkerdTools)
  (dict "value" "stage" "because" $linkerdTools)
) }}
{{- end }}

{{/* One line for each of them that is set to another value. */}}
{{- define "tulle.unused-lines" -}}
{{- range fromYamlArray (include "tulle.unused" .) }}
{{- $current := $.Values }}
{{- range splitList "." .value }}
{{- $current = index (kindIs "map" $current | ternary $current dict) . }}
{{- end }}
{{- if ne (toJson $current) (toJson .default) }}
{{ .value }}: {{ .because }}
{{- end }}
{{- end }}
{{- end }}
