package tpm

import (
	"errors"
	"fmt"
	"slices"

	gotpm "github.com/google/go-tpm/tpm2"
	"github.com/google/go-tpm/tpm2/transport"
)

// conn is an open TPM within one sequence.
type conn struct {
	owner *TPM
	tpm   transport.TPM
	used  []gotpm.TPMHandle // loaded by this sequence, in order
}

// keyID identifies a primary key of the endorsement hierarchy.
type keyID string

// object is a loaded key.
type object struct {
	handle gotpm.TPMHandle
	name   gotpm.TPM2BName
	public gotpm.TPMTPublic
}

// savedKey is the context of a primary key (TPM2_ContextSave). Loading it takes far less time than
// making the key again. A TPM that was reset since then refuses it.
type savedKey struct {
	context gotpm.TPMSContext
	name    gotpm.TPM2BName
	public  gotpm.TPMTPublic
}

// primary loads the endorsement hierarchy's primary key of a template. The hierarchy's auth value
// must be empty, as it is unless other software manages the TPM.
func (c *conn) primary(id keyID, template gotpm.TPMTPublic) (*object, error) {
	c.owner.mu.Lock()
	saved, ok := c.owner.keys[id]
	c.owner.mu.Unlock()
	if ok {
		rsp, err := withRoom(c, gotpm.ContextLoad{Context: saved.context}.Execute)
		if err == nil {
			c.used = append(c.used, rsp.LoadedHandle)
			return &object{handle: rsp.LoadedHandle, name: saved.name, public: saved.public}, nil
		}
		// The TPM was reset: make the key again.
	}
	rsp, err := withRoom(c, gotpm.CreatePrimary{
		PrimaryHandle: gotpm.AuthHandle{Handle: gotpm.TPMRHEndorsement, Auth: gotpm.PasswordAuth(nil)},
		InPublic:      gotpm.New2B(template),
	}.Execute)
	if errors.Is(err, gotpm.TPMRCBadAuth) || errors.Is(err, gotpm.TPMRCAuthFail) {
		return nil, fmt.Errorf("create %s: the endorsement hierarchy has an auth value; set it to the empty one (tpm2_changeauth -c endorsement): %w", id, err)
	}
	if err != nil {
		return nil, fmt.Errorf("create %s in the endorsement hierarchy: %w", id, err)
	}
	c.used = append(c.used, rsp.ObjectHandle)
	public, err := rsp.OutPublic.Contents()
	if err != nil {
		return nil, fmt.Errorf("create %s: decode public area: %w", id, err)
	}
	o := &object{handle: rsp.ObjectHandle, name: rsp.Name, public: *public}
	if ctx, err := (gotpm.ContextSave{SaveHandle: o.handle}).Execute(c.tpm); err == nil {
		c.owner.mu.Lock()
		c.owner.keys[id] = savedKey{context: ctx.Context, name: o.name, public: o.public}
		c.owner.mu.Unlock()
	}
	return o, nil
}

// withRoom runs a command that loads something. If the TPM has no room, it flushes handles that a
// killed process left behind and tries once more. This cannot flush a running process's handles:
// this process holds the lock, and a kernel resource manager shows us only our own handles.
func withRoom[R any](c *conn, execute func(transport.TPM, ...gotpm.Session) (R, error)) (R, error) {
	rsp, err := execute(c.tpm)
	if !errors.Is(err, gotpm.TPMRCObjectMemory) && !errors.Is(err, gotpm.TPMRCSessionMemory) && !errors.Is(err, gotpm.TPMRCSessionHandles) {
		return rsp, err
	}
	if ferr := c.flushLeftovers(); ferr != nil {
		return rsp, errors.Join(err, ferr)
	}
	return execute(c.tpm)
}

func (c *conn) flushLeftovers() error {
	for _, first := range []gotpm.TPMHandle{0x80000000, 0x02000000, 0x03000000} { // transient, loaded sessions, saved sessions
		handles, err := c.handles(first, 64)
		if err != nil {
			return err
		}
		for _, h := range handles {
			if slices.Contains(c.used, h) {
				continue
			}
			if _, err := (gotpm.FlushContext{FlushHandle: h}).Execute(c.tpm); err != nil {
				return fmt.Errorf("flush leftover handle 0x%08x: %w", uint32(h), err)
			}
		}
	}
	return nil
}

// handles lists up to count handles, starting at first, within first's range.
func (c *conn) handles(first gotpm.TPMHandle, count uint32) ([]gotpm.TPMHandle, error) {
	var out []gotpm.TPMHandle
	for next := first; ; {
		rsp, err := gotpm.GetCapability{
			Capability: gotpm.TPMCapHandles, Property: uint32(next), PropertyCount: count,
		}.Execute(c.tpm)
		if err != nil {
			return nil, fmt.Errorf("list handles from 0x%08x: %w", uint32(first), err)
		}
		list, err := rsp.CapabilityData.Data.Handles()
		if err != nil {
			return nil, fmt.Errorf("list handles from 0x%08x: %w", uint32(first), err)
		}
		for _, h := range list.Handle {
			if h>>24 != first>>24 {
				return out, nil
			}
			out = append(out, h)
		}
		if !rsp.MoreData || len(list.Handle) == 0 || len(out) > 1024 {
			return out, nil
		}
		next = list.Handle[len(list.Handle)-1] + 1
	}
}

// flush unloads everything that this sequence loaded, in reverse order.
func (c *conn) flush() error {
	var errs []error
	for _, h := range slices.Backward(c.used) {
		if _, err := (gotpm.FlushContext{FlushHandle: h}).Execute(c.tpm); err != nil {
			errs = append(errs, fmt.Errorf("flush handle 0x%08x: %w", uint32(h), err))
		}
	}
	c.used = nil
	return errors.Join(errs...)
}
