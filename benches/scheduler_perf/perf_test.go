// Package perf runs Kubernetes' scheduler_perf on nodes of eight GPUs, without and with gpustow's extender.
// run.sh, which sets the variables of the environment, says how.
package perf

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	v1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	_ "k8s.io/component-base/logs/json/register"
	perf "k8s.io/kubernetes/test/integration/scheduler_perf"
	"k8s.io/kubernetes/test/utils/ktesting"
	"sigs.k8s.io/yaml"
)

const (
	gpus   = 8
	gpuMiB = 81920
	// Requests at once.
	width = 32
	// How long the extender may take to become ready.
	startup = time.Minute
)

var gpuNodes = schema.GroupVersionResource{Group: "gpustow.dev", Version: "v1alpha1", Resource: "gpunodes"}

func TestMain(m *testing.M) {
	if err := perf.InitTests(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	m.Run()
}

func BenchmarkPerfScheduling(b *testing.B) {
	perf.RunBenchmarkPerfScheduling(b, "workloads.yaml", "gpustow", nil, perf.WithPrepareFn(prepare))
}

// prepare creates the nodes, and starts the extender for the test case that is named after it.
func prepare(tCtx ktesting.TContext) error {
	extended := strings.Contains(tCtx.Name(), "/Gpustow/")
	if extended {
		if err := install(tCtx); err != nil {
			return fmt.Errorf("install gpustow's resource: %w", err)
		}
	}
	count, err := strconv.Atoi(os.Getenv("NODES"))
	if err != nil {
		return fmt.Errorf("NODES: %w", err)
	}
	var group errgroup.Group
	group.SetLimit(width)
	for index := range count {
		group.Go(func() error { return createNode(tCtx, index, extended) })
	}
	if err := group.Wait(); err != nil {
		return fmt.Errorf("create nodes: %w", err)
	}
	if extended {
		return startExtender(tCtx)
	}
	return nil
}

// install creates the namespace of the extender's Lease and the GpuNode resource, which is served then.
func install(tCtx ktesting.TContext) error {
	namespace := &v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "gpustow-system"}}
	if _, err := tCtx.Client().CoreV1().Namespaces().Create(tCtx, namespace, metav1.CreateOptions{}); err != nil {
		return err
	}
	text, err := os.ReadFile(os.Getenv("GPUNODE_CRD"))
	if err != nil {
		return err
	}
	var definition apiextensionsv1.CustomResourceDefinition
	if err := yaml.Unmarshal(text, &definition); err != nil {
		return err
	}
	definitions := tCtx.APIExtensions().ApiextensionsV1().CustomResourceDefinitions()
	if _, err := definitions.Create(tCtx, &definition, metav1.CreateOptions{}); err != nil {
		return err
	}
	return eventually(tCtx, func() error {
		_, err := tCtx.Dynamic().Resource(gpuNodes).List(tCtx, metav1.ListOptions{})
		return err
	})
}

// createNode creates a node, and its agent's report if the extender is to read one.
func createNode(tCtx ktesting.TContext, index int, reported bool) error {
	name := fmt.Sprintf("gpu-node-%05d", index)
	capacity := v1.ResourceList{
		v1.ResourcePods:       resource.MustParse("110"),
		v1.ResourceCPU:        resource.MustParse("192"),
		v1.ResourceMemory:     resource.MustParse("1Ti"),
		"gpustow.dev/gpu-mem": *resource.NewQuantity(gpus*gpuMiB, resource.DecimalSI),
	}
	node := &v1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Status: v1.NodeStatus{
			Capacity:    capacity,
			Allocatable: capacity,
			Conditions:  []v1.NodeCondition{{Type: v1.NodeReady, Status: v1.ConditionTrue}},
		},
	}
	if _, err := tCtx.Client().CoreV1().Nodes().Create(tCtx, node, metav1.CreateOptions{}); err != nil {
		return err
	}
	if !reported {
		return nil
	}
	object := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": gpuNodes.GroupVersion().String(),
		"kind":       "GpuNode",
		"metadata":   map[string]any{"name": name},
		"spec":       map[string]any{},
	}}
	if _, err := tCtx.Dynamic().Resource(gpuNodes).Create(tCtx, object, metav1.CreateOptions{}); err != nil {
		return err
	}
	cards := make([]any, gpus)
	for card := range gpus {
		cards[card] = map[string]any{
			"uuid":     fmt.Sprintf("GPU-%08x-0000-4000-8000-%012x", index, card),
			"index":    card,
			"model":    "NVIDIA H100 80GB HBM3",
			"totalMiB": gpuMiB,
			"healthy":  true,
		}
	}
	report, err := json.Marshal(map[string]any{"status": map[string]any{
		"gpus":      cards,
		"heartbeat": time.Now().UTC().Format(time.RFC3339),
	}})
	if err != nil {
		return err
	}
	_, err = tCtx.Dynamic().Resource(gpuNodes).Patch(tCtx, name, types.MergePatchType, report, metav1.PatchOptions{}, "status")
	return err
}

// startExtender starts the extender on the test's API server, waits until it is ready, and ends it with the test.
func startExtender(tCtx ktesting.TContext) error {
	config := tCtx.RESTConfig()
	kubeconfig := clientcmdapi.NewConfig()
	kubeconfig.Clusters["test"] = &clientcmdapi.Cluster{
		Server:                   config.Host,
		CertificateAuthority:     config.CAFile,
		CertificateAuthorityData: config.CAData,
		TLSServerName:            config.ServerName,
	}
	kubeconfig.AuthInfos["test"] = &clientcmdapi.AuthInfo{Token: config.BearerToken}
	kubeconfig.Contexts["test"] = &clientcmdapi.Context{Cluster: "test", AuthInfo: "test"}
	kubeconfig.CurrentContext = "test"
	if err := clientcmd.WriteToFile(*kubeconfig, "extender.kubeconfig"); err != nil {
		return err
	}
	log, err := os.Create("extender.log")
	if err != nil {
		return err
	}
	defer log.Close()
	health := os.Getenv("HEALTH")
	command := exec.Command(os.Getenv("GPUSTOW"), "--kubeconfig=extender.kubeconfig", "--log=warn",
		"--listen="+os.Getenv("LISTEN"), "--health-listen="+health)
	command.Stdout, command.Stderr = log, log
	if err := command.Start(); err != nil {
		return err
	}
	tCtx.Cleanup(func() {
		_ = command.Process.Kill()
		_ = command.Wait()
	})
	// No connection may outlive the test.
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	return eventually(tCtx, func() error {
		answer, err := client.Get("http://" + health + "/readyz")
		if err != nil {
			return err
		}
		defer answer.Body.Close()
		if answer.StatusCode != http.StatusOK {
			return fmt.Errorf("/readyz: %s", answer.Status)
		}
		return nil
	})
}

// eventually repeats a probe until it succeeds.
func eventually(tCtx ktesting.TContext, probe func() error) error {
	end := time.Now().Add(startup)
	for {
		err := probe()
		if err == nil {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("not within %s: %w", startup, err)
		}
		select {
		case <-tCtx.Done():
			return tCtx.Err()
		case <-time.After(100 * time.Millisecond):
		}
	}
}
