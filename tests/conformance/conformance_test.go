// Package conformance runs the conformance tests of the Gateway API for meshes, as released.
//
// `./run conformance` builds it and runs it against a cluster with the charts. The flags are those of the suite.
package conformance

import (
	"testing"

	"k8s.io/apimachinery/pkg/util/sets"
	"sigs.k8s.io/gateway-api/conformance"
	"sigs.k8s.io/gateway-api/conformance/utils/suite"
	"sigs.k8s.io/gateway-api/pkg/features"
)

// skippedTests are the tests that no implementation can pass.
var skippedTests = []string{
	// It applies the manifest of MeshHTTPRoute303Redirect, so no route matches its request: kubernetes-sigs/gateway-api#4806.
	"MeshHTTPRoute307Redirect",
}

func TestConformance(t *testing.T) {
	options := conformance.DefaultOptions(t)
	options.ConformanceProfiles = sets.New(suite.MeshHTTPConformanceProfileName, suite.MeshGRPCConformanceProfileName)
	// The tests of meshes also use features of routes. All other tests need a Gateway.
	options.EnableAllSupportedFeatures = true
	options.ExemptFeatures = sets.New(features.SupportGateway)
	options.SkipTests = append(options.SkipTests, skippedTests...)
	options.NamespaceAnnotations = map[string]string{"linkerd.io/inject": "enabled"}

	implementation := &options.Implementation
	implementation.Organization = "tulle-mesh"
	implementation.Project = "tulle"
	implementation.URL = "https://github.com/tulle-mesh/tulle"
	implementation.Contact = []string{"https://github.com/tulle-mesh/tulle/issues"}

	conformance.RunConformanceWithOptions(t, options)
}
